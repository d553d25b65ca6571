"""One number of the simulator with its band, and a user's own measurements beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import main
from harness.cli.validate import command as validate
from harness.errors import UsageError
from harness.fit.points import KINDS, predict
from harness.fit.rows import compare_rows

ROWS: dict[str, dict[str, str]] = {
    "serving": {"model": "Qwen3-8B", "concurrency": "8", "input_tokens": "128", "output_tokens": "64"},
    "static": {"model": "Qwen3-32B", "tp": "2", "batch": "32", "context": "4000"},
    "kv_capacity": {"model": "Qwen3-8B"},
    "rl_step": {
        "model": "Qwen3-8B", "gpus": "8", "responses": "64", "mean_tokens": "500", "max_tokens": "1000",
        "train_samples": "32",
    },
    "kernel": {"kernel": "gemm", "m": "64", "n": "4096", "k": "4096"},
    "sync": {"model": "Qwen3-8B", "gpus": "8"},
    "shift": {"model": "Qwen3-8B", "role": "rollout"},
}  # fmt: skip


def values(kind: str, machines: int = 0, **more: str) -> dict[str, float]:
    found = predict({"kind": kind, **ROWS[kind], **more}, machines=machines)
    return {one.metric: one.value for one in found}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_value_in_or_near_its_band(kind: str) -> None:
    for one in predict({"kind": kind, **ROWS[kind]}, machines=8):
        assert 0 < one.low < one.high
        assert 0.5 * one.low < one.value < 2 * one.high


def test_all_kinds_are_tried() -> None:
    assert set(ROWS) == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "metric", "more"),
    [
        ("serving", "tpot_ms", {"concurrency": "16"}),
        ("serving", "output_tok_s", {"concurrency": "16"}),
        ("static", "step_ms", {"context": "8000"}),
        ("kv_capacity", "kv_tokens", {"share": "0.95"}),
        ("kv_capacity", "kv_tokens", {"device": "h200"}),
        ("rl_step", "step_s", {"responses": "128"}),
        ("kernel", "latency_us", {"m": "4096"}),
        ("kernel", "latency_us", {"device": "h20", "m": "8192"}),
        ("sync", "seconds", {"way": "gather"}),
        ("shift", "seconds", {"model": "Qwen3-32B"}),
    ],
)
def test_more_is_more(kind: str, metric: str, more: dict[str, str]) -> None:
    fewer = {"device": "h100", "m": "8192"} if more.get("device") == "h20" else {}
    assert values(kind, **more)[metric] > values(kind, **fewer)[metric]


def test_a_newer_engine_serves_many_faster() -> None:
    old, new = (values("serving", engine=name, concurrency="64") for name in ("vllm-0.12", "vllm-0.30"))
    assert new["output_tok_s"] > 1.2 * old["output_tok_s"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"kind": "servin"}, "unknown kind 'servin'; did you mean 'serving'?"),
        ({"kind": "static", "model": "Qwen3-8B", "batch": "4"}, "no 'context', which a row of kind"),
        ({"kind": "static", "model": "Qwen3-8", "batch": "4", "context": "1"}, "did you mean 'Qwen3-8B'?"),
        ({"kind": "sync", "model": "Qwen3-8B", "gpus": "many"}, "gpus is 'many', not a number"),
        ({"kind": "sync", "model": "Qwen3-8B", "gpus": "0"}, "gpus is 0; a number above 0 is needed"),
        ({"kind": "sync", "model": "Qwen3-8B", "gpus": "8", "device": "h1000"}, "did you mean 'h100'?"),
        ({"kind": "sync", "model": "Qwen3-8B", "gpus": "8", "way": "gathr"}, "did you mean 'gather'?"),
        ({"kind": "kernel", "kernel": "gem"}, "did you mean 'gemm'?"),
        ({"kind": "shift", "model": "Qwen3-8B", "role": "train"}, "unknown role 'train'"),
        ({"kind": "serving", "model": "Qwen2.5-72B", "concurrency": "1", "input_tokens": "1",
          "output_tokens": "1"}, "leave no memory for a KV cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_one_line(row: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        predict(row, "row 7", machines=0)
    assert str(error.value).startswith("row 7: ")
    assert says in str(error.value)


def measured(tmp_path: Path) -> Path:
    """Rows that the simulator meets to within 5 %, and one that it does not."""
    step_ms = values("static")["step_ms"]
    path = tmp_path / "mine.csv"
    path.write_text(
        "kind,model,device,tp,batch,context,step_ms,kv_tokens\n"
        + "".join(f"static,Qwen3-32B,h100,2,32,4000,{step_ms * off},\n" for off in (0.95, 1.0, 1.05))
        + f"kv_capacity,Qwen3-8B,h100,1,,,,{values('kv_capacity')['kv_tokens'] * 2}\n"
    )
    return path


def test_own_rows_become_signed_errors_by_group(tmp_path: Path) -> None:
    static, capacity = compare_rows(measured(tmp_path)).groups
    assert (static.rows, static.median) == (3, pytest.approx(0.0, abs=1e-6))
    assert static.inside == 1.0
    assert static.mape == pytest.approx((1 / 0.95 - 1 + 1 - 1 / 1.05) / 3, rel=1e-3)
    assert (capacity.rows, capacity.median, capacity.inside) == (1, pytest.approx(-0.5), 0.0)


def test_own_rows_as_a_command(tmp_path: Path) -> None:
    asked = ["--rows", str(measured(tmp_path)), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(validate, asked, catch_exceptions=False)
    assert result.exit_code == 0
    assert "static Qwen3-32B h100 step_ms" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "rows.json",
        "rows.pdf",
        "rows.png",
        "rows.csv",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sort,model\nstatic,Qwen3-8B\n",
            "no column 'kind', which says what a row measures; it has sort, model",
        ),
        ("kind,model\n", "has no rows"),
        ("kind,model,gpus\nsync,Qwen3-8B,8\n", ":2: says none of seconds"),
        ("kind,model,gpus,seconds\nsync,Qwen3-8B,8,soon\n", ":2: seconds is 'soon', not a number"),
        ("kind,model,gpus,seconds\nsync,Qwen3-8B,8,-1\n", ":2: seconds is -1; a number above 0"),
    ],
)
def test_own_rows_that_say_nothing_are_refused_with_their_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        compare_rows(path)
    assert says in str(error.value)


def test_predict_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "kv_capacity", "--model", "Qwen3-8B", "--with", "share=0.8", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["low"] < found["value"] < found["high"]) == ("kv_tokens", True)


@pytest.mark.parametrize("asked", [[], ["--data", "x", "--rows", "y"]])
def test_validate_takes_one_of_two(asked: list[str]) -> None:
    result = CliRunner().invoke(validate, asked)
    assert isinstance(result.exception, UsageError)

"""Priors and traces: what lengths are drawn, and which files are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, pvariance

import pandas as pd
import pytest

from harness.errors import UsageError
from harness.runs.spec import resolve
from harness.studies.plan import plan
from workloads.groups import Lengths
from workloads.synthetic import SyntheticWorkload, length_priors
from workloads.traces import TraceError, read_trace


def logs(lengths: Lengths, first: int = 0, groups: int = 600) -> list[list[float]]:
    workload = SyntheticWorkload(lengths, 0, samples=16, judge_calls=1, prompts=100)
    return [[math.log(x) for x in workload.lengths_of(g)[1]] for g in range(first, first + groups)]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_groups_difficulty_is_shared(share: float) -> None:
    drawn = logs(Lengths(group_share=share, response_cap=10_000_000))
    within = fmean(pvariance(group) for group in drawn) * 16 / 15
    total = pvariance([value for group in drawn for value in group])
    assert total == pytest.approx(1.0, abs=0.12)
    assert within == pytest.approx(1 - share, abs=0.06)


def test_lengths_drift_by_rl_step() -> None:
    lengths = Lengths(drift=0.1, response_cap=10_000_000)
    early, late = (fmean(x for g in logs(lengths, first, 100) for x in g) for first in (0, 1000))
    assert late - early == pytest.approx(0.1 * 10, abs=0.25)


def test_there_is_an_atom_at_the_cap() -> None:
    drawn = [x for group in logs(Lengths(response_cap=2000)) for x in group]
    assert sum(x == math.log(2000) for x in drawn) > 0.2 * len(drawn)
    assert max(drawn) == math.log(2000)


def test_longer_responses_get_longer_judgements() -> None:
    workload = SyntheticWorkload(Lengths(judge_sigma=0.0), 0, samples=16, judge_calls=1, prompts=100)
    pairs = [(r, j[0]) for g in range(50) for r, j in zip(*workload.lengths_of(g)[1:], strict=True)]
    assert sorted(pairs) == sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_trace_in_three_formats(tmp_path: Path) -> None:
    rows = pd.DataFrame({"input_length": [10, 20], "output_length": [100, 300]})
    paths = [tmp_path / f"t.{ending}" for ending in ("csv", "parquet", "jsonl")]
    rows.to_csv(paths[0], index=False)
    rows.to_parquet(paths[1])
    rows.to_json(paths[2], orient="records", lines=True)
    for path in paths:
        trace = read_trace(path)
        assert (trace.inputs, trace.outputs) == ((10, 20), (100, 300))


def test_a_histogram_is_drawn_by_probability(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "h.csv", "output_tokens,probability\n10,0.9\n1000,0.1\n"))
    workload = SyntheticWorkload(Lengths(), 0, samples=16, judge_calls=1, prompts=8, trace=trace)
    drawn = [x for group in range(200) for x in workload.lengths_of(group)[1]]
    assert set(drawn) == {10, 1000}
    assert drawn.count(1000) / len(drawn) == pytest.approx(0.1, abs=0.02)
    assert length_priors(Lengths(), trace)["rollout"].mean == pytest.approx(109, rel=0.1)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.csv",
            "tokens\n1\n",
            "how long responses are; it has tokens. Accepted",
        ),
        ("a.csv", "output_tokens\n5\n-3\n", "row 2: output_tokens is -3; lengths are 1 to 10000000"),
        ("a.csv", "output_tokens\n5\n99999999\n", "row 2: output_tokens is 1e+08"),
        ("a.csv", "output_tokens\n5\nmany\n", "row 2: output_tokens is 'many', not a length"),
        ("a.csv", "output_tokens\n5\n\n7\n", None),
        ("a.csv", "output_tokens,x\n5,1\n,2\n", "row 2: output_tokens is '', not a length"),
        ("a.csv", "output_tokens,probability\n5,1.5\n", "row 1: probability is '1.5', not a probability"),
        ("a.csv", "output_tokens,probability\n5,0\n", "probability adds up to 0"),
        ("a.csv", "output_tokens\n", "has no rows"),
        ("a.jsonl", "{", "a.jsonl:1: not JSON"),
        ("a.parquet", "PAR1 no parquet", "a.parquet: "),
        ("a.txt", "", "has no rows"),
    ],
)
def test_bad_traces_are_one_line(name: str, text: str, says: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    if says is None:
        assert read_trace(path).outputs == (5, 7)  # blank lines are no rows
        return
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{path}:")
    assert "\n" not in str(error.value)


def spec(**more: object) -> object:
    asked = {"system": "pivot", "model": "dense-9b", "backend": "sim", "steps": 2, "seed": 0}
    return resolve(**{**asked, "staleness": None, "gpus": None, "settings": (), **more})  # type: ignore[arg-type]


def test_a_plan_has_percentiles_and_memory() -> None:
    found = plan(spec(settings=("lengths.drift=0.5",)))  # type: ignore[arg-type]
    rows = {row["what"]: row for row in found["lengths"]}
    assert rows["response, last step"]["p50"] > 1.3 * rows["response, first step"]["p50"]
    assert rows["judgement"]["p50"] < rows["judgement"]["p95"] < rows["judgement"]["p99"]
    assert found["memory"]["rollout"]["weights_gb"] == pytest.approx(3.09, abs=0.01)
    assert found["memory"]["train"]["smallest_unit_devices"] == 1


CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip


def test_another_model_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = write(tmp_path / "mine", "config.json", json.dumps(CONFIG))
    changed = spec(configs={"policy": path})
    assert changed.group.pair.policy == "mine"  # type: ignore[attr-defined]
    assert plan(changed)["memory"]["rollout"]["model"] == "mine on 1 x h20"  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"--judge-config .*config\.json: No such file"):
        spec(configs={"judge": tmp_path / "none" / "config.json"})


def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    from harness.runs.assemble import assemble

    path = write(tmp_path, "config.json", json.dumps(CONFIG))
    asked = spec(model="moe-30b", configs={"judge": path})
    with pytest.raises(UsageError, match="judge_tp=4 does not divide the 6 attention heads"):
        assemble(asked)  # type: ignore[arg-type]

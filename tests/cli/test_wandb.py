"""The W&B mirror: what it shows is what was recorded, and a run is the same without it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UnfitError, UsageError
from harness.results import wandb as wandb_
from harness.results.wandb import Mirror, chosen_mode, metrics
from harness.runs.runner import RunResult, run
from tests.conftest import small_spec

BLOCK = 1 << 15  # of the LevelDB log format
HEADER = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    """Records of a W&B offline file: a LevelDB log behind seven bytes of identification."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        body = data[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts


def history(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(logged rows, config, run name) of the offline run below `directory`."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, config, name = [], {}, ""
    for raw in records(next(directory.glob("wandb/offline-run-*/*.wandb"))):
        record = pb.Record()
        record.ParseFromString(raw)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif record.HasField("run"):
            name = record.run.display_name
            config.update({i.key: json.loads(i.value_json) for i in record.run.config.update})
    return rows, config, name


def recorded(root: Path, mirror: Mirror) -> RunResult:
    return run(small_spec(steps=2), root, mirror=mirror)


def test_the_offline_file_has_what_the_summary_has(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    result = recorded(tmp_path, Mirror("offline"))
    assert result.directory.manifest["wandb"] == "offline"
    rows, config, name = history(result.directory.path)
    assert name == result.directory.id
    assert config["system"] == "pivot"
    assert config["kind_of_numbers"] == "simulated"
    assert len(rows) == 2
    for row, step in zip(rows, result.summary["steps"], strict=True):
        shown = {key: value for key, value in row.items() if not key.startswith("_")}
        assert shown == pytest.approx(metrics(step, result.summary["gpus"]))
        assert row["_step"] == step["step"]
        for known in ("timing_s/gen", "timing_s/reward", "timing_s/update_actor", "perf/throughput",
                      "response_length/mean"):  # fmt: skip
            assert known in shown


def test_names_of_what_is_learned() -> None:
    step = {
        "step_s": 2.0, "reward": 0.5, "policy_tokens": 6, "judge_tokens": 2, "learn_grad_norm": 0.1,
        "true_accuracy": None,
    }  # fmt: skip
    assert metrics(step, gpus=4) == {
        "timing_s/step": 2.0, "critic/score/mean": 0.5, "actor/grad_norm": 0.1, "perf/throughput": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("/bin/false",), "failed: exit code 1"),
        (("/nowhere/at/all",), "failed: it could not be started"),
        (("sh", "-c", "echo no such project; exit 3"), "failed: no such project"),
        (("sleep", "60"), "failed: it did not end within 0 s"),
    ],
)
def test_a_run_is_the_same_with_a_mirror_that_fails(
    command: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    quiet = recorded(tmp_path, Mirror("disabled"))
    failing = recorded(tmp_path, Mirror("online", patience_s=0.2, command=command))
    assert failing.directory.manifest["status"] == "complete"
    assert failing.directory.manifest["wandb"] == says
    assert failing.summary["events_sha256"] == quiet.summary["events_sha256"]
    assert failing.summary["steps"] == quiet.summary["steps"]


def test_the_environment_names_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ID", "NAME", "RESUME", "RUN_GROUP", "SWEEP_ID", "FORK_FROM", "TAGS", "DIR", "PROJECT"):
        monkeypatch.setenv(f"WANDB_{name}", "one")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    monkeypatch.setenv("WANDB_CONFIG_DIR", "here")
    given = {key: value for key, value in wandb_.surroundings().items() if key.startswith("WANDB_")}
    given.pop("WANDB_API_KEY", None)
    assert given == {"WANDB_SILENT": "true", "WANDB_ENTITY": "us", "WANDB_CONFIG_DIR": "here"}


def test_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb_.importlib.util, "find_spec", lambda name: object())
    assert chosen_mode(None) == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert chosen_mode(None) == "online"
    assert chosen_mode("disabled") == "disabled"
    with pytest.raises(UsageError, match="did you mean 'offline'"):
        chosen_mode("offlin")
    monkeypatch.setattr(wandb_.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnfitError, match="pip install"):
        chosen_mode("offline")
    monkeypatch.delenv("WANDB_MODE")
    assert chosen_mode(None) == "disabled"

"""What was cut off, could not be parsed, or is no number any more is never silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.summary import cut_off_lines, cut_off_step
from harness.errors import InvalidRun
from harness.results.record import list_runs
from harness.results.summary import CUT_OFF, WORTH_A_WARNING, warnings_of
from harness.results.wandb import metrics
from harness.runs.runner import RunResult, recompute, run
from harness.runs.spec import resolve

QUICK = ("workload.prompts=4", "learning.max_new_tokens=48")


def recorded(root: Path, backend: str, *settings: str, steps: int = 1) -> RunResult:
    pytest.importorskip("torch")
    spec = resolve(
        system="colocated", model="tiny-dense", backend=backend, steps=steps, seed=3, staleness=0, gpus=2,
        settings=(*QUICK, *settings),
    )  # fmt: skip
    return run(spec, root)


@pytest.mark.parametrize("backend", ["cosim", "live"])
def test_judgements_that_are_cut_off_are_counted_and_warned_of(backend: str, tmp_path: Path) -> None:
    result = recorded(tmp_path, backend, "learning.judge_max_new_tokens=5")
    step, counts = result.summary["steps"][0], result.summary["cut_off"]
    assert step["reward"] == 0.0
    assert step["judgements_truncated"] == step["verdicts_unparsable"] == step["unparsable_truncated"] == 32
    assert counts["judgements"] == 32
    assert any("judgements were cut off" in line for line in result.summary["warnings"])
    assert any("no verdict that can be parsed (32 of them" in line for line in result.summary["warnings"])
    assert sum(line.startswith("WARNING") for line in cut_off_lines(result.summary)) >= 2
    assert "32 judgements cut, 32 unparsable, 32 of them cut" in cut_off_step(step)
    shown = metrics(step, gpus=2)
    assert shown["judge_length/clip_ratio"] == shown["judge/unparsable_ratio"] == 1.0
    assert shown["judge/unparsable_clip_ratio"] == 1.0
    assert recompute(result.directory) == result.summary


def test_both_backends_count_the_same(tmp_path: Path) -> None:
    settings = ("learning.max_new_tokens=12", "learning.judge_max_new_tokens=30")
    steps = [recorded(tmp_path, backend, *settings).summary["steps"][0] for backend in ("cosim", "live")]
    counts = [{key: step[key] for key in CUT_OFF} for step in steps]
    assert counts[0] == counts[1]
    assert counts[0]["responses_truncated"] > 0
    assert 0 < counts[0]["judgements_truncated"] < 32


def test_a_warning_begins_above_the_stated_share() -> None:
    def counts(truncated: int) -> dict[str, int | None]:
        known = {"responses": 100, "judgements": 100, "responses_truncated": truncated}
        return {**dict.fromkeys(CUT_OFF), **known}

    at = round(100 * WORTH_A_WARNING)
    assert warnings_of(counts(at)) == []
    assert warnings_of(counts(at + 1)) == [f"{at + 1}.0% of 100 responses were cut off at their cap"]
    assert warnings_of(dict.fromkeys((*CUT_OFF, "responses", "judgements"))) == [], "unknown is no warning"


@pytest.mark.parametrize("backend", ["cosim", "live"])
def test_training_that_diverges_ends_the_run(backend: str, tmp_path: Path) -> None:
    """Weights that are no numbers would otherwise be served, judged and sealed as complete."""
    with pytest.raises(InvalidRun, match=r"training diverged(?: in RL step [12])?: "):
        recorded(tmp_path, backend, "learning.lr=1e6", steps=4)
    (manifest,) = list_runs(tmp_path)
    assert manifest["status"] == "invalid"
    assert "training diverged" in manifest["reason"]

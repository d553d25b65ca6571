"""How long one GRPO step of 128 samples takes, ours and TRL's; run with `--benchmark-only`.

The times are pytest-benchmark's: TRL's include its set-up inside `train()`, which `compare_trl.py` leaves
out. No test depends on a time; what is asserted is that the work was real.
"""

from __future__ import annotations

from typing import Any

import pytest
from grpo_step import GROUP, STEP_SAMPLES, OurStep, StepReport, TrlStep

from workloads.hops import task

ROUNDS = 3


def steps(kind: type[OurStep] | type[TrlStep], benchmark: Any) -> list[tuple[Any, StepReport]]:
    """Time `ROUNDS` fresh steps after one that warms up; every step and its report."""
    made: list[tuple[Any, StepReport]] = []

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        return (kind(seed=len(made)),), {}

    def run(step: Any) -> None:
        made.append((step, step.run()))

    benchmark.pedantic(run, setup=fresh, rounds=ROUNDS, warmup_rounds=1)
    return made


def assert_real(report: StepReport) -> None:
    learning = GROUP.learning
    assert len(report.responses) == len(report.critiques) == len(report.rewards) == STEP_SAMPLES
    assert all(0 < len(response) <= learning.max_new_tokens for response in report.responses)
    assert all(0 < len(critique) <= learning.judge_max_new_tokens for critique in report.critiques)
    assert list(report.rewards) == [task.verdict(critique) or 0.0 for critique in report.critiques]
    assert 0.0 < sum(report.rewards) < STEP_SAMPLES  # the judge tells responses apart
    assert len(set(report.responses)) > STEP_SAMPLES // 4  # sampled, not greedy
    assert report.weights_after != report.weights_before


def test_grpo_step_ours(benchmark: Any) -> None:
    for _, report in steps(OurStep, benchmark):
        assert_real(report)


def test_grpo_step_trl(benchmark: Any) -> None:
    pytest.importorskip("trl")
    ours = OurStep(seed=0).run()
    for step, report in steps(TrlStep, benchmark):
        assert_real(report)
        assert report.weights_before == ours.weights_before
        assert step.mean_reward_seen() == pytest.approx(sum(report.rewards) / STEP_SAMPLES)

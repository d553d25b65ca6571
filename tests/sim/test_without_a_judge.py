"""A rule that gives the reward: no judgements, no reward replicas, and the same pipeline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.runs.assemble import check_request
from harness.runs.spec import resolve
from systems.policies import SYSTEMS
from tests.conftest import SMALL, simulate, small_spec

RULED = (*SMALL, "workload.judge_calls=0")
DATA = Path(os.environ.get("PIVOT_BENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_runs_without_a_judge(system: str, staleness: int) -> None:
    log, tally, _ = simulate(small_spec(system, steps=2, settings=RULED, staleness=staleness))
    summary = tally.summary()
    assert len(summary["steps"]) == 2
    assert summary["tokens_per_s"]["judge"] == 0
    assert summary["gpu_time_share"]["reward"] == 0
    assert {event["role"] for event in log.of("sequence.finished")} == {"rollout"}
    assert len(log.of("sample.scored")) == 2 * 8 * 8
    assert summary["makespan_s"] >= summary["lower_bound_s"]


def test_judging_takes_time() -> None:
    with_judge, without = (
        simulate(small_spec("colocated", steps=1, settings=settings, staleness=0))[1].summary()["makespan_s"]
        for settings in (SMALL, RULED)
    )
    assert without < with_judge


def test_a_split_without_reward_replicas_is_one() -> None:
    settings = (*RULED, "cluster.train=4", "cluster.rollout=4", "cluster.reward=0")
    spec = small_spec("disaggregated", gpus=None, settings=(*settings, "cluster.gpus=8"))
    _, layout, _ = check_request(spec)
    assert sum(layout.template.values()) == 8
    judged = small_spec(
        "disaggregated", gpus=None, settings=(*settings, "cluster.gpus=8", "workload.judge_calls=1")
    )
    with pytest.raises(UsageError, match=r"cluster.reward=0: must be a positive multiple"):
        check_request(judged)


def test_real_text_needs_its_judge() -> None:
    spec = resolve(
        system="pivot", model="tiny-dense", backend="cosim", steps=1, seed=0, staleness=0, gpus=None,
        settings=("workload.judge_calls=0",),
    )  # fmt: skip
    with pytest.raises(UsageError, match="learns from its judge"):
        check_request(spec)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the public measurements (PIVOT_BENCH_DATA)")
def test_published_ratios_are_reported() -> None:
    from harness.studies.published import RATIOS, ratio_checks

    found = [check for check, _, _ in ratio_checks(DATA)]
    assert len(found) == 4 + len(RATIOS), "modes that a system stands for, and ratios"
    assert all(check.met is None for check in found), "reported, not gated"
    assert all(abs(check.value) < 0.5 for check in found)

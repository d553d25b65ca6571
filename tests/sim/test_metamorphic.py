"""What must hold between runs, whatever their numbers are: examples do not find what these do."""

from statistics import fmean

import pytest

from tests.conftest import simulate, small_spec

# Enough sequences a replica that spreading them matters, few enough that sixteen runs take seconds.
BUSY = ("workload.prompts=32", "workload.samples=8", "workload.mini_batches=4")
SEEDS = range(8)
SLACK = 0.02  # of the makespan, in the mean of the seeds: when a worker dies decides which sequences share


def mean_makespan(system: str, *settings: str, gpus: int | None = 16) -> float:
    """Seconds, over development seeds."""
    return fmean(
        simulate(small_spec(system, steps=2, seed=seed, gpus=gpus, settings=(*BUSY, *settings)))[1].summary()[
            "makespan_s"
        ]
        for seed in SEEDS
    )


@pytest.mark.parametrize("system", ["colocated", "disaggregated"])
def test_a_run_whose_workers_are_killed_is_never_faster(system: str) -> None:
    untouched = mean_makespan(system)
    hit = mean_makespan(system, "faults.losses=5", "faults.within_s=400")
    assert hit >= untouched * (1 - SLACK)


def test_fewer_workers_are_never_faster() -> None:
    more, fewer = mean_makespan("colocated", gpus=16), mean_makespan("colocated", gpus=12)
    assert fewer >= more * (1 - SLACK)


def test_a_longer_judge_is_never_cheaper() -> None:
    short = mean_makespan("colocated", "lengths.judge_at_1k=300")
    long = mean_makespan("colocated", "lengths.judge_at_1k=360")
    assert long >= short


def test_weights_that_change_in_flight_interrupt_nobody_and_are_never_slower() -> None:
    log, _, _ = simulate(
        small_spec("disaggregated", steps=6, gpus=None, settings=(*BUSY, "workload.publishing=in-flight"))
    )
    assert not [event for event in log.of("sequences.requeued") if event["why"] == "publish"]
    assert any(event["segments"] > 1 for event in log.of("sequence.finished")), "an update came in between"
    interrupted = mean_makespan("disaggregated", "workload.publishing=interrupt", gpus=None)
    in_flight = mean_makespan("disaggregated", "workload.publishing=in-flight", gpus=None)
    assert in_flight <= interrupted * (1 + SLACK)

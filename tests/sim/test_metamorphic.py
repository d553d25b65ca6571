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

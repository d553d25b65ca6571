"""The steady fluid optimum: what it must be whatever the numbers are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from harness.runs.assemble import Parts, assemble
from systems.costs.fluid import steady
from systems.types import Role
from tests.conftest import simulate, small_spec

GROUPS = ("dense-9b", "moe-30b", "moe-122b", "moe-30b-policy")


def parts_of(group: str, staleness: int = 2, **settings: str) -> Parts:
    given = tuple(f"{key}={value}" for key, value in settings.items())
    return assemble(small_spec("pivot", group, steps=20, gpus=None, staleness=staleness, settings=given))


def found(parts: Parts, **changed: object) -> tuple[float, float]:
    recipe = replace(parts.recipe, **changed)  # type: ignore[arg-type]
    at = steady(parts.cost, parts.layout, recipe, parts.prior)
    return at.static_s, at.divisible_s


@pytest.mark.parametrize("group", GROUPS)
def test_divisible_shares_are_never_slower_than_the_best_split(group: str) -> None:
    for staleness in (0, 1, 2, 8):
        static_s, divisible_s = found(parts_of(group), staleness=staleness)
        assert divisible_s <= static_s * 1.001


@pytest.mark.parametrize("group", GROUPS)
def test_more_staleness_is_never_slower_and_in_the_limit_all_devices_just_work(group: str) -> None:
    parts = parts_of(group)
    times = [found(parts, staleness=staleness) for staleness in (0, 1, 2, 4, 64)]
    for earlier, later in itertools.pairwise(times):
        assert later[0] <= earlier[0] * 1.001
        assert later[1] <= earlier[1] * 1.001
    static_s, divisible_s = times[-1]
    assert static_s / divisible_s < 1.2, "what is left is that blocks are whole"


def test_the_best_static_split_fills_the_cluster_and_holds_the_training_state() -> None:
    parts = parts_of("moe-122b")
    at = steady(parts.cost, parts.layout, parts.recipe, parts.prior)
    assert sum(at.static_split) * parts.layout.block == 128
    assert at.static_split[0] * parts.layout.block >= parts.layout.train_min


def test_a_workload_without_a_judge_has_one_serving_role() -> None:
    with_judge, without = parts_of("dense-9b"), parts_of("dense-9b", **{"workload.judge_calls": "0"})
    at = steady(without.cost, without.layout, without.recipe, without.prior)
    assert at.divisible_s < found(with_judge)[1]
    assert at.static_split[2] == 0


def test_a_run_says_how_near_it_came() -> None:
    _, tally, _ = simulate(small_spec("pivot", gpus=None, steps=9))
    near = tally.summary()["efficiency"]
    assert 0.0 < near["of_bound"] <= 1.0
    assert near["of_steady_optimum"] is not None
    _, tally, _ = simulate(small_spec("pivot", gpus=None, steps=2))
    assert tally.summary()["efficiency"]["of_steady_optimum"] is None, "it never was steady"
    assert tally.began.template[Role.TRAIN] > 0

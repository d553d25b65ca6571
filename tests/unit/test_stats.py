"""Verdicts: rarely wrong where there is nothing, right where something was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.stats import Verdict, compare_independent, compare_paired

TRIALS = 100


def false_verdicts(n: int, paired: bool, spread: float = 0.05) -> int:
    """How often two halves of the same runs are told apart."""
    wrong = 0
    for trial in range(TRIALS):
        rng = np.random.default_rng(trial)
        runs = np.exp(rng.normal(0, spread, 2 * n))
        rng.shuffle(runs)
        one, other = runs[:n], runs[n:]
        if paired:
            effect = compare_paired(dict(enumerate(one)), dict(enumerate(other)))
        else:
            effect = compare_independent(one.tolist(), other.tolist())
        wrong += effect.verdict is not Verdict.INCONCLUSIVE
    return wrong


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("n", [6, 10])
def test_two_halves_of_the_same_runs_are_rarely_told_apart(n: int, paired: bool) -> None:
    assert false_verdicts(n, paired) <= 0.07 * TRIALS


def test_five_pairs_can_prove_nothing() -> None:
    """The smallest p of a signed-rank test on five pairs is 1/16."""
    effect = compare_paired(dict.fromkeys(range(5), 1.0), {seed: 2.0 + 0.01 * seed for seed in range(5)})
    assert effect.p == pytest.approx(1 / 16)
    assert effect.low > 1.9
    assert effect.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("trial", range(20))
def test_a_planted_speed_up_of_five_percent_is_found_with_ten_seeds(trial: int) -> None:
    """Runs differ by 10 % from seed to seed, and systems on one seed by 2 %."""
    rng = np.random.default_rng(trial)
    base = {seed: 1000 * math.exp(rng.normal(0, 0.1)) for seed in range(10)}
    faster = {seed: value * 1.05 * math.exp(rng.normal(0, 0.02)) for seed, value in base.items()}
    effect = compare_paired(base, faster)
    assert effect.verdict is Verdict.FASTER
    assert effect.low < 1.05 * 1.02
    assert compare_paired(faster, base).verdict is Verdict.SLOWER


def test_without_pairs_the_same_speed_up_drowns_in_the_seeds() -> None:
    rng = np.random.default_rng(0)
    base = [1000 * math.exp(rng.normal(0, 0.1)) for _ in range(10)]
    faster = [value * 1.05 for value in base]
    assert compare_independent(base, faster).verdict is Verdict.INCONCLUSIVE


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12), st.floats(0.5, 2.0))
def test_an_effect_turns_round_with_its_sides(values: list[float], factor: float) -> None:
    base = dict(enumerate(values))
    other = {seed: value * factor * (1 + 0.01 * seed) for seed, value in base.items()}
    there, back = compare_paired(base, other), compare_paired(other, base)
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.low <= there.ratio * (1 + 1e-9)
    assert there.ratio <= there.high * (1 + 1e-9)
    assert there == compare_paired(base, other), "the same interval every time"


def test_one_run_has_no_interval() -> None:
    effect = compare_paired({1: 1.0}, {1: 2.0})
    assert (effect.low, effect.high, effect.p) == (0.0, math.inf, None)
    assert effect.verdict is Verdict.INCONCLUSIVE
    assert compare_independent([1.0], [2.0, 2.1]).verdict is Verdict.INCONCLUSIVE


def test_equal_runs_are_equal() -> None:
    effect = compare_paired({1: 3.0, 2: 4.0}, {1: 3.0, 2: 4.0})
    assert (effect.ratio, effect.low, effect.high, effect.p) == (1.0, 1.0, 1.0, None)

"""Verdicts: rarely wrong where there is nothing, right where something was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.studies.stats import (
    FEWEST_FOR_A_VERDICT,
    RESAMPLES,
    Verdict,
    compare_independent,
    compare_paired,
)

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


def test_the_interval_is_bias_corrected() -> None:
    """A lopsided sample: SciPy's BCa interval on the same draws, which is not the plain percentile one."""
    ratios = [1.0, 1.01, 1.02, 1.02, 1.03, 1.03, 1.04, 1.9]
    effect = compare_paired(dict.fromkeys(range(8), 1.0), dict(enumerate(ratios)))
    expected = {}
    for method in ("BCa", "percentile"):
        found = stats.bootstrap(
            (np.log(ratios),), np.mean, n_resamples=RESAMPLES, method=method, rng=np.random.default_rng(0),
            confidence_level=0.95,
        ).confidence_interval  # fmt: skip
        expected[method] = (math.exp(found.low), math.exp(found.high))
    assert (effect.low, effect.high) == pytest.approx(expected["BCa"])
    assert abs(expected["BCa"][1] - expected["percentile"][1]) > 0.01


def test_a_verdict_needs_the_interval_and_the_rank_test() -> None:
    """Each of the two alone says nothing: a rank test can be sure of a mean that is not, and the reverse."""
    ranks_only = [1.01] * 9 + [0.5]  # nearly all above 1, and the mean below
    effect = compare_paired(dict.fromkeys(range(10), 1.0), dict(enumerate(ranks_only)))
    assert effect.low < 1 < effect.high or effect.high < 1
    steady = [1.001 + 0.0001 * i for i in range(12)] + [0.98]
    effect = compare_paired(dict.fromkeys(range(13), 1.0), dict(enumerate(steady)))
    assert effect.p is not None
    assert effect.p < 0.05
    assert effect.low < 1 < effect.high
    assert effect.verdict is Verdict.INCONCLUSIVE
    interval_only = compare_paired(dict.fromkeys(range(5), 1.0), {s: 2.0 + 0.01 * s for s in range(5)})
    assert interval_only.low > 1
    assert interval_only.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("paired", [True, False])
def test_fewest_for_a_verdict_is_where_a_rank_test_first_can(paired: bool) -> None:
    """As far apart as can be, with one run fewer there is no verdict."""
    least = FEWEST_FOR_A_VERDICT[paired]
    for n in (least - 1, least):
        low, high = [1.0 + 0.001 * i for i in range(n)], [9.0 + 0.01 * i for i in range(n)]
        if paired:
            effect = compare_paired(dict(enumerate(low)), dict(enumerate(high)))
        else:
            effect = compare_independent(low, high)
        assert effect.n == n
        assert (effect.verdict is Verdict.FASTER) == (n == least)


def test_pairs_of_other_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="the same seeds"):
        compare_paired({1: 1.0, 2: 1.0}, {1: 1.0, 3: 1.0})


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

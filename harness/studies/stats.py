"""How two systems compare: an effect with an interval over *runs*, a rank test, and a verdict.

A replicate is a run. Effects are ratios of geometric means, on logarithms. With common seeds runs are paired,
and what is tested is the ratio within a pair; without, two independent samples.

* The interval is a bootstrap over runs (BCa, 95 %): pairs are drawn together.
* The test is Wilcoxon's signed-rank test for pairs, Mann-Whitney's for independent runs.
* Faster or slower is said only if both agree: the interval excludes 1 and p < 0.05. With few runs a bootstrap
  interval is too short, and the rank test holds it back: below six pairs no rank test can reach 0.05.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05
RESAMPLES = 9999
FEWEST = 2  # runs, for an interval
# Pairs (or runs a side) with which the rank test can reach 0.05 at all: 2 / 2^6 and 2 / (8 over 4) do.
FEWEST_FOR_A_VERDICT = {True: 6, False: 4}  # by whether runs are paired
Floats = NDArray[np.float64]


class Verdict(StrEnum):
    """How a contender does against a baseline, where larger is better."""

    FASTER = "faster"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Effect:
    """`ratio` of contender to baseline with its interval; `p` of the rank test, None with too few runs."""

    ratio: float
    low: float
    high: float
    p: float | None
    n: int  # pairs, or runs of the smaller side
    paired: bool
    verdict: Verdict

    @property
    def has_interval(self) -> bool:
        """One run has none: it reaches from 0 to infinity."""
        return math.isfinite(self.high)


DECIDING_SHARE = 0.8  # of plausible machines that must agree before a verdict is given over them


@dataclass(frozen=True)
class OverMachines:
    """How a ratio differs between plausible machines, on each of which it is the mean over seeds.

    `low` to `high` hold 80 % of the machines; `share` of them are on the ratio's side of 1.
    """

    machines: int
    share: float
    low: float
    high: float


def over_machines(ratios: Mapping[int, Sequence[float]]) -> OverMachines:
    """From the ratios by machine, one a seed."""
    logs = np.array([float(np.mean(np.log(found))) for found in ratios.values()])
    low, high = np.exp(np.quantile(logs, (0.1, 0.9)))
    side = np.sign(logs.mean())
    return OverMachines(logs.size, float(np.mean(np.sign(logs) == side)), float(low), float(high))


def compare_paired(baseline: Mapping[Any, float], contender: Mapping[Any, float]) -> Effect:
    """Positive values by seed. Seeds that only one side has are left out by the caller."""
    if baseline.keys() != contender.keys():
        raise ValueError(f"pairs need the same seeds, not {sorted(baseline)} and {sorted(contender)}")
    logs = np.array([math.log(contender[seed] / baseline[seed]) for seed in sorted(baseline)])
    low, high = _interval(logs)
    p = float(stats.wilcoxon(logs).pvalue) if logs.size >= FEWEST and np.any(logs) else None
    return _effect(float(logs.mean()), low, high, p, logs.size, True)


def compare_independent(baseline: Sequence[float], contender: Sequence[float]) -> Effect:
    """Positive values of runs that have nothing to do with each other."""
    one, other = (np.log(np.asarray(values, dtype=np.float64)) for values in (baseline, contender))
    mean = float(other.mean() - one.mean())
    n, low, high, p = min(one.size, other.size), -math.inf, math.inf, None
    if n >= FEWEST:
        low, high = _bootstrap((one, other), lambda a, b, axis: b.mean(axis=axis) - a.mean(axis=axis), mean)
        p = float(stats.mannwhitneyu(one, other).pvalue)
    return _effect(mean, low, high, p, n, False)


def _effect(log: float, low: float, high: float, p: float | None, n: int, paired: bool) -> Effect:
    verdict = Verdict.INCONCLUSIVE
    if p is not None and p < LEVEL and (low > 0 or high < 0):
        verdict = Verdict.FASTER if log > 0 else Verdict.SLOWER
    return Effect(math.exp(log), math.exp(low), math.exp(high), p, n, paired, verdict)


def _interval(logs: Floats) -> tuple[float, float]:
    if logs.size < FEWEST:
        return -math.inf, math.inf
    return _bootstrap((logs,), lambda a, axis: a.mean(axis=axis), float(logs.mean()))


def _bootstrap(
    samples: tuple[Floats, ...], statistic: Callable[..., Any], value: float
) -> tuple[float, float]:
    """The same interval every time: the draws are from a fixed seed. Without spread it is a point."""
    if all(np.ptp(sample) < 1e-15 for sample in samples):
        return value, value
    for method in ("BCa", "percentile"):  # BCa is not defined for some small or lopsided samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            bootstrap: Any = stats.bootstrap
            found = bootstrap(
                samples, statistic, confidence_level=1 - LEVEL, n_resamples=RESAMPLES, method=method,
                rng=np.random.default_rng(0), vectorized=True,
            ).confidence_interval  # fmt: skip
        if not (math.isnan(found.low) or math.isnan(found.high)):
            return float(found.low), float(found.high)
    return -math.inf, math.inf

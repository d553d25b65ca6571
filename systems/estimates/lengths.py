"""The distribution of lengths behind what has ended and what still runs. Pure.

A sequence that runs is not ignored: it says that its length is above what it has by now. Leaving it out
would make every estimate too short, because what ends first is short. The estimator is that of Kaplan and
Meier (1958): the share that goes on beyond a length x is the product, over all ends up to x, of the share
of those that had got that far and did not end there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Levels at which quantiles are kept: even in the middle, dense in the tail that a batch waits for.
LEVELS = (*(i / 20 for i in range(19)), 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A role's lengths in tokens: mean, standard deviation over mean, and quantiles at `LEVELS`."""

    mean: float
    cv: float
    quantiles: tuple[float, ...]


def estimate(ended: Iterable[int], running: Iterable[int] = ()) -> Lengths:
    """Lengths, given those that ended and how far the running ones are.

    What goes on beyond the longest end is put there, so the mean is at least a lower estimate. Raises
    `ValueError` if nothing has ended.
    """
    ends = Counter(ended)
    if not ends:
        raise ValueError("no sequence has ended: nothing is known of lengths")
    stays = Counter(running)
    at_risk = ends.total() + stays.total()
    censored = sorted(stays)
    next_stay = 0
    surviving = 1.0
    masses: list[tuple[int, float]] = []
    for length in sorted(ends):
        while next_stay < len(censored) and censored[next_stay] < length:
            at_risk -= stays[censored[next_stay]]
            next_stay += 1
        mass = surviving * ends[length] / at_risk
        masses.append((length, mass))
        surviving -= mass
        at_risk -= ends[length]
    longest, mass = masses[-1]
    masses[-1] = (longest, mass + max(0.0, surviving))
    mean = math.fsum(length * mass for length, mass in masses)
    square = math.fsum(length * length * mass for length, mass in masses)
    return Lengths(mean, math.sqrt(max(0.0, square - mean * mean)) / mean, _quantiles(masses))


def _quantiles(masses: list[tuple[int, float]]) -> tuple[float, ...]:
    """The shortest length that at least a share `level` does not exceed, for each level."""
    found = []
    at, below = 0, masses[0][1]
    for level in LEVELS:
        while at + 1 < len(masses) and below < level - 1e-12:
            at += 1
            below += masses[at][1]
        found.append(float(masses[at][0]))
    return tuple(found)

"""Plausible machines: the coefficients of the cost model, drawn together from what is known of each.

Every coefficient has a band (`bands.toml`): 80 % of what is plausible lies inside. A machine multiplies the
seconds (or bytes) of each axis by a factor, lognormal with that band; N machines are a Latin hypercube, so
that each axis is covered evenly by few of them. The nominal machine, number 0, has no factors: it is what the
fits say.

A band that does not have 1 in its middle says that other devices were slower than what is transferred to
them, so the middle of the machines is slower than the nominal one.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEED = 20261201  # of the hypercube; machine k of N is the same machine in every run
SPREAD = (
    1.2815515655446004  # standard deviations from the middle of a normal distribution to its 90 % quantile
)
TRANSFERRED = "transferred"
MOST_MACHINES = 256


class Status(StrEnum):
    """Where a band is from."""

    MEASURED = "measured"
    TRANSFERRED = "transferred"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Band:
    """80 % of what is plausible lies between `low` and `high` times what the coefficient gives."""

    low: float
    high: float
    status: Status
    source: str

    def factor(self, uniform: float) -> float:
        """The lognormal quantile of a number between 0 and 1."""
        from statistics import NormalDist

        middle = (math.log(self.low) + math.log(self.high)) / 2
        sigma = (math.log(self.high) - math.log(self.low)) / 2 / SPREAD
        return math.exp(middle + sigma * NormalDist().inv_cdf(uniform))


@cache
def bands(device: str) -> Mapping[str, Band]:
    """The bands of every axis on a kind of device, by axis."""
    raw: dict[str, Any] = tomllib.loads((HERE / "bands.toml").read_text())
    found = {}
    for axis, entry in raw.items():
        chosen = entry if "low" in entry else entry.get(device, entry[TRANSFERRED])
        found[axis] = Band(chosen["low"], chosen["high"], Status(chosen["status"]), chosen["source"])
    return found


@cache
def machine(device: str, number: int, of: int) -> Mapping[str, float]:
    """Machine `number` of `of`, by axis how many times as long it takes; 0 is the nominal one.

    Raises `ValueError` for a number that is not among them.
    """
    if not 0 <= number <= of <= MOST_MACHINES:
        raise ValueError(f"machine {number} of {of}")
    if number == 0:
        return {}
    from scipy.stats import qmc

    known = bands(device)
    drawn = qmc.LatinHypercube(d=len(known), rng=SEED).random(of)[number - 1]
    return {axis: band.factor(float(u)) for (axis, band), u in zip(known.items(), drawn, strict=True)}

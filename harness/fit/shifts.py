"""What a shift and a new version cost, from seconds that others report (`quoted_shifts.toml`).

    a new version   control + bytes a device / (what a node copies / its devices)
    a warm shift    control + bytes a device / (the same)

The first gives what a node's devices copy together, by kind of device, and the control of an update; the
second, with the copying taken off, the control of a shift: the median, because the reports differ by more
than their models do. How a shift's seconds divide among its phases is assumed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from systems.costs.cost import GatherCost
from workloads.groups import architecture

QUOTED = Path(__file__).parent / "quoted_shifts.toml"
NODE = 8  # devices
SHIFTED_ON = "h800"  # what PEARL used; the others do not say
PHASES = {"park": 0.1, "release": 0.125, "load": 0.125, "warm": 0.55, "ready": 0.1}  # of a shift; assumed


@dataclass(frozen=True)
class Update:
    """A new version, loaded everywhere."""

    what: str
    hardware: str
    device_bytes: float
    seconds: float


@dataclass(frozen=True)
class QuotedShift:
    """A warm shift as somebody reports it."""

    what: str
    system: str
    device_bytes: float
    seconds: float


@dataclass(frozen=True)
class ShiftFit:
    """`node_bytes_per_s` by kind of device; seconds of control."""

    node_bytes_per_s: dict[str, float]
    update_s: float
    shift_s: float

    def updated_s(self, row: Update) -> float:
        return self.update_s + row.device_bytes * NODE / self.node_bytes_per_s[row.hardware]

    def shifted_s(self, row: QuotedShift) -> float:
        return self.shift_s + row.device_bytes * NODE / self.node_bytes_per_s[SHIFTED_ON]


def quoted() -> tuple[list[Update], list[QuotedShift]]:
    raw = tomllib.loads(QUOTED.read_text())
    return [Update(**row) for row in raw["update"]], [QuotedShift(**row) for row in raw["shift"]]


@dataclass(frozen=True)
class Gather:
    """A full synchronisation in which parameters are gathered, tensor by tensor."""

    what: str
    model: str
    seconds: float


def gathers() -> list[Gather]:
    return [Gather(**row) for row in tomllib.loads(QUOTED.read_text())["gather"]]


def fit_gather(rows: Sequence[Gather]) -> GatherCost:
    """Least squares of relative errors: two numbers from four rows."""

    def residuals(logs: np.ndarray) -> list[float]:
        fit = GatherCost(*np.exp(logs).tolist())
        return [float(np.log(fit.seconds(architecture(row.model)) / row.seconds)) for row in rows]

    return GatherCost(*np.exp(least_squares(residuals, np.log([2.5e-10, 8e-4])).x).tolist())


def unfitted() -> list[Update]:
    """Reported as well, but not fitted to: how they move bytes differs too much."""
    return [Update(**row) for row in tomllib.loads(QUOTED.read_text())["unfitted"]]


def fit_shifts(updates: Sequence[Update], shifts: Sequence[QuotedShift]) -> ShiftFit:
    """Least squares of relative errors for updates; the median for shifts."""
    kinds = sorted({row.hardware for row in updates})

    def fit_of(values: np.ndarray, shift_s: float = 0.0) -> ShiftFit:
        rates = {kind: float(value) * 1e9 for kind, value in zip(kinds, values[1:], strict=True)}
        return ShiftFit(rates, float(values[0]), shift_s)

    def residuals(logs: np.ndarray) -> list[float]:
        found = fit_of(np.exp(logs))
        return [float(np.log(found.updated_s(row) / row.seconds)) for row in updates]

    start = np.log([1.0, *([60.0] * len(kinds))])
    values = np.exp(least_squares(residuals, start).x)
    copying = fit_of(values)
    return fit_of(values, median(row.seconds - copying.shifted_s(row) for row in shifts))


def held_out_shifts(
    updates: Sequence[Update], shifts: Sequence[QuotedShift]
) -> list[tuple[QuotedShift, float]]:
    """Each system's shifts, predicted from those of the others."""
    found = []
    for row in shifts:
        others = [other for other in shifts if other.system != row.system]
        found.append((row, fit_shifts(updates, others).shifted_s(row)))
    return found

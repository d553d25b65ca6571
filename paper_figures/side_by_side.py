"""Bars and panels of one figure: which runs are one bar, and which bars may stand beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.results.comparable import (
    Side,
    check_cores,
    check_kinds,
    check_seeds,
    check_staleness,
    differences,
    newest_of_each_seed,
)
from harness.results.tables import Recorded, reservations

FIGURES_ALLOW = ("staleness", "seeds")  # what `--allow` can name here: all else is never drawn together


@dataclass(frozen=True)
class Shown:
    """The runs of one figure, one a seed and bar, and what its reader must be told on the picture itself."""

    runs: tuple[Recorded, ...]
    notes: tuple[str, ...]


def side_by_side(runs: Sequence[Recorded], allow: frozenset[str]) -> Shown:
    """Bars are (model group, system). Raises `UsageError` for runs that may not stand beside each other.

    The rule is that of comparisons (`harness/results/comparable.py`): one kind, one workload a model group, a
    common seed, equal bounds and, within a group, equal realised staleness.
    """
    everything = Side("these runs", tuple(runs))
    notes = [*check_kinds([everything], frozenset()), *check_cores([everything], frozenset())]
    found: dict[str, dict[str, list[Recorded]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, Recorded] = {}
    for run in runs:
        model, system = run.spec["group"]["name"], run.spec["system"]
        same = first.setdefault(model, run)
        if run.workload != same.workload:
            raise UsageError(f"{run.id} and {same.id} {differences(run, same)}; choose runs with --run")
        found[model][system].append(run)
    kept: list[Recorded] = []
    unequal = False
    for model, systems in found.items():
        sides = []
        for system, of_bar in systems.items():
            _check_replicates(system, model, of_bar)
            side, repeated = newest_of_each_seed(system, of_bar)
            sides.append(side)
            notes += repeated
            kept += side.runs
        notes += check_seeds(sides, allow, model)
        unequal |= bool(check_staleness(sides, allow, model))
    bounds = _check_bounds(kept, allow)
    if unequal or len(bounds) > 1:  # bars and panels say of what bound they are, and what was realised
        notes.append(f"UNEQUAL STALENESS (bounds {', '.join(map(str, bounds))}): asynchrony is in it")
    ids = {run.id for run in kept}
    shown = tuple(run for run in runs if run.id in ids)
    return Shown(shown, tuple(dict.fromkeys([*notes, *reservations(shown)])))


def _check_replicates(system: str, model: str, runs: Sequence[Recorded]) -> None:
    """Runs of one bar are shown as one number."""
    bounds = Side(system, tuple(runs)).bounds
    if len(bounds) > 1:
        said = " and ".join(map(str, bounds))
        raise UsageError(
            f"{system} on {model} was run with staleness bounds {said}, which are not replicates; choose "
            "runs with --run"
        )


def _check_bounds(runs: Sequence[Recorded], allow: frozenset[str]) -> list[int]:
    """All bounds; one, if nothing else is allowed: also between groups, which a page puts side by side."""
    bounds = Side("", tuple(runs)).bounds
    if len(bounds) > 1 and "staleness" not in allow:
        said = ", ".join(map(str, bounds))
        raise UsageError(
            f"unequal staleness bounds ({said}): asynchrony would be in it; choose runs with --run, or "
            "--allow staleness"
        )
    return bounds


def staleness_label(bound: int, realised: float) -> str:
    """What a bar or a panel must say of its staleness."""
    return f"bound {bound}, realised {realised:.2f}"

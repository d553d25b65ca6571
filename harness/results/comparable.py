"""Which runs may stand side by side, in a comparison or in a figure. One rule, used by all.

| name           | refused unless allowed by name                                                       |
|----------------|--------------------------------------------------------------------------------------|
| kind           | numbers of different kinds                                                           |
| oversubscribed | live workers that shared cores: their times say nothing of a device                  |
| staleness      | unequal staleness bounds, or a realised staleness that differs: asynchrony is in it  |
| workload       | another model group, setting, number of steps, or cost                               |
| seeds          | no seed in common: systems would have been given other work                          |

What is allowed in spite of it is not silent: it comes back as a note that the reader must be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from harness.errors import UsageError, unknown
from harness.results.tables import Recorded, Replicate

ALLOWABLE = ("kind", "workload", "staleness", "seeds", "oversubscribed")
STALENESS_TOLERANCE = 0.1  # versions, of the mean over runs; a fifth of a half-asynchronous step


@dataclass(frozen=True)
class Side:
    """The runs of one workload that are shown as one: one side of a comparison, one bar of a figure."""

    label: str
    runs: tuple[Recorded, ...]

    @property
    def staleness(self) -> float:
        """Realised, mean over runs."""
        return fmean(run.staleness for run in self.runs)

    @property
    def bounds(self) -> list[int]:
        """Staleness bounds of its runs."""
        return sorted({run.spec["staleness"] for run in self.runs})

    @property
    def kind(self) -> str:
        return " and ".join(sorted({str(run.kind) for run in self.runs}))


def check_names(allowed: Iterable[str], known: Sequence[str] = ALLOWABLE) -> frozenset[str]:
    """What a user allows by name. Raises `UsageError` for what cannot be."""
    names = frozenset(allowed)
    for name in sorted(names):
        if name not in known:
            raise unknown("--allow", name, known)
    return names


def check_kinds(sides: Sequence[Side], allow: frozenset[str]) -> list[str]:
    """Numbers of one kind. Raises `UsageError`; otherwise the notes that a reader must be shown."""
    kinds = [side.kind for side in sides]
    if len(set(kinds)) == 1 and " and " not in kinds[0]:
        return []
    said = ", ".join(f"{side.label} is {side.kind}" for side in sides)
    if "kind" not in allow:
        raise UsageError(f"{said}: numbers of different kinds are not compared (--allow kind)")
    return [said]


def check_cores(sides: Sequence[Side], allow: frozenset[str]) -> list[str]:
    """Workers with cores of their own. Raises `UsageError`; otherwise notes."""
    crowded = [run.id for side in sides for run in side.runs if run.summary.get("oversubscribed")]
    if not crowded:
        return []
    if "oversubscribed" not in allow:
        raise UsageError(
            f"{crowded[0]} is oversubscribed (more workers than cores), so its times are not compared "
            "(--allow oversubscribed)"
        )
    return [f"{len(crowded)} runs had more workers than cores"]


def check_staleness(sides: Sequence[Side], allow: frozenset[str], where: str = "") -> list[str]:
    """Equal bounds, and a realised staleness that is equal within the tolerance.

    Raises `UsageError`; otherwise notes. `where` names the workload in a refusal.
    """
    realised = [side.staleness for side in sides]
    bounds = {bound for side in sides for bound in side.bounds}
    if len(bounds) == 1 and max(realised) - min(realised) <= STALENESS_TOLERANCE:
        return []
    first, *others = reversed(sides)  # a contender comes before its baseline
    said = ", ".join(
        [
            f"{first.label} realised a staleness of {first.staleness:.2f}",
            *(f"{side.label} one of {side.staleness:.2f}" for side in others),
        ]
    )
    said += f" (bounds {', '.join(' and '.join(map(str, side.bounds)) for side in (first, *others))})"
    if "staleness" not in allow:
        at = f"{where}: " if where else ""
        raise UsageError(
            f"{at}{said}, so asynchrony would be in the comparison; choose runs at equal bounds "
            "(staleness=0), or --allow staleness"
        )
    return [f"{said}: asynchrony is in it"]


def check_seeds(sides: Sequence[Side], allow: frozenset[str], where: str = "") -> list[str]:
    """A seed that all have. Raises `UsageError`; otherwise notes."""
    seeds = [{run.replicate for run in side.runs} for side in sides]
    if not set.intersection(*seeds) and "seeds" not in allow:
        at, who = f"{where}: " if where else "", " and ".join(side.label for side in sides)
        what = "machine" if len({one.machines for found in seeds for one in found}) > 1 else "seed"
        raise UsageError(
            f"{at}{who} have no {what} in common, so no pairs (--allow seeds compares them as independent "
            "samples)"
        )
    return [] if all(one == seeds[0] for one in seeds) else ["not all of them ran the same seeds"]


def newest_of_each_seed(label: str, runs: Sequence[Recorded]) -> tuple[Side, list[str]]:
    """One run a seed and machine (`runs` are oldest first), and a note if there were more.

    Raises `UsageError` if runs of a seed asked for different things: they are no replicates.
    """
    kept: dict[Replicate, Recorded] = {}
    for run in runs:
        before = kept.get(run.replicate)
        if before is not None and before.spec != run.spec:
            a, b = flat(before.spec), flat(run.spec)
            key = next(key for key in (*a, *b) if a.get(key) != b.get(key)).removeprefix("group.")
            one, other = (values.get(key, values.get(f"group.{key}")) for values in (a, b))
            raise UsageError(
                f"{label} has runs of seed {run.seed} that differ in {key} ({one} and {other}): "
                f"add it to the selection, as in '{label},{key}={other}'"
            )
        kept[run.replicate] = run
    repeated = len(runs) - len(kept)
    notes = [f"{label}: the newest of {repeated + 1} equal runs of a seed"] if repeated else []
    return Side(label, tuple(kept[one] for one in sorted(kept))), notes


def workload_of(run: Recorded, allow: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What runs must share to be of one workload. If it may differ, the model group is all of it."""
    if "workload" in allow:
        return {"model": run.spec["group"]["name"]}
    if "kind" in allow:
        return {key: run.workload.get(key) for key in ("steps", "group", "trace")}
    return run.workload


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def differences(one: Recorded, other: Recorded) -> str:
    """Where two workloads differ, in words."""
    a, b = flat(one.workload), flat(other.workload)
    keys = [key for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
    named = [f"{key.removeprefix('group.')} ({a.get(key)}, {b.get(key)})" for key in sorted(keys)]
    return "differ in " + ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")

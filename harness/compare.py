"""Which runs are compared with which, and when that is refused.

A comparison is between runs of one kind, with one workload (model group, settings, steps, costs), seed by
seed, at equal realised staleness. What is not so is refused with the difference, unless allowed by name.

A side of it is a selection: 'pivot', 'system=pivot,staleness=0', 'lengths.response_median=700', or a run.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from harness.errors import UsageError, unknown
from harness.stats import Effect, compare_independent, compare_paired
from harness.store import Recorded
from systems.policies import ALIASES, SYSTEMS
from workloads.groups import group_names, load_group

ALLOWABLE = ("kind", "workload", "staleness", "seeds")
STALENESS_TOLERANCE = 0.1  # versions, of the mean over runs; a fifth of a half-asynchronous step
FEW = 10  # below so many pairs the raw points are shown

# Larger is better in all of them. Throughput counts policy and judge tokens over all devices.
METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "throughput": lambda summary: summary["tokens_per_s"]["total"],
    "policy-throughput": lambda summary: summary["tokens_per_s"]["policy"],
    "judge-throughput": lambda summary: summary["tokens_per_s"]["judge"],
    "speed": lambda summary: 1 / summary["makespan_s"],
}


@dataclass(frozen=True)
class Side:
    """A selection's runs of one workload."""

    label: str
    runs: tuple[Recorded, ...]

    @property
    def staleness(self) -> float:
        return fmean(run.staleness for run in self.runs)

    def by_seed(self, metric: str) -> dict[int, float]:
        return {run.seed: METRICS[metric](run.summary) for run in self.runs}


@dataclass(frozen=True)
class Contrast:
    """A contender against a baseline on one workload."""

    workload: str
    kind: str
    metric: str
    baseline: Side
    contender: Side
    effect: Effect
    points: dict[int, float]  # ratio by seed; empty where runs are not paired
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        sides = {
            name: {"label": side.label, "staleness": side.staleness, "runs": [run.id for run in side.runs]}
            for name, side in (("baseline", self.baseline), ("contender", self.contender))
        }
        return {
            "workload": self.workload, "kind": self.kind, "metric": self.metric, **sides,
            **asdict(self.effect), "points": self.points, "notes": list(self.notes),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------- selecting


def select(runs: Sequence[Recorded], text: str) -> list[Recorded]:
    """The runs that a selection names. Raises `UsageError` if there are none."""
    found = list(runs)
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals and ALIASES.get(part, part) not in SYSTEMS:
            found = [run for run in found if part in run.id or part == str(run.directory.path)]
            if not found:
                raise UsageError(f"'{part}' is no system, no key=value and no part of a run's name here")
            continue
        if not equals:
            key, value = "system", part
        if key == "system":
            value = ALIASES.get(value, value)
        offered = sorted({spelled(run, key) for run in found})
        found = [run for run in found if spelled(run, key) == spelled_value(value)]
        if not found:
            raise UsageError(f"no run with {key}={value}; there are: {', '.join(offered)}")
    return found


TOP = ("system", "seed", "staleness", "steps", "backend")


def spelled(run: Recorded, key: str) -> str:
    """A run's value of a selection key."""
    spec = run.spec
    if key in TOP:
        return spelled_value(spec[key])
    if key == "model":
        return str(spec["group"]["name"])
    if key == "gpus":
        return spelled_value(spec["group"]["cluster"]["gpus"])
    if key == "kind":
        return str(run.kind)
    table, _, field = key.partition(".")
    tables = {name: part for name, part in spec["group"].items() if isinstance(part, dict)}
    if field in tables.get(table, {}):
        return spelled_value(tables[table][field])
    known = [
        *TOP,
        "model",
        "gpus",
        "kind",
        *(f"{name}.{one}" for name, part in tables.items() for one in part),
    ]
    raise unknown("selection key", key, known)


def spelled_value(value: Any) -> str:
    """700, 700.0 and '700' are one."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


# ------------------------------------------------------------------------------------------- comparing


def compare(
    runs: Sequence[Recorded], selections: Sequence[str], metric: str = "throughput",
    allow: frozenset[str] = frozenset(),
) -> list[Contrast]:  # fmt: skip
    """The first selection is the baseline of all others. Raises `UsageError` for what is not comparable."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    for name in sorted(allow):
        if name not in ALLOWABLE:
            raise unknown("--allow", name, ALLOWABLE)
    if len(selections) < 2:
        raise UsageError("compare needs a baseline and at least one other")
    baseline = select(runs, selections[0])
    found: list[Contrast] = []
    for text in selections[1:]:
        found += _against(selections[0], baseline, text, select(runs, text), metric, allow)
    return found


def _against(
    base: str, baseline: list[Recorded], text: str, contender: list[Recorded], metric: str,
    allow: frozenset[str],
) -> Iterator[Contrast]:  # fmt: skip
    kinds = sorted({str(run.kind) for run in baseline}), sorted({str(run.kind) for run in contender})
    if "kind" not in allow and (kinds[0] != kinds[1] or len(kinds[0]) > 1):
        raise UsageError(
            f"{base} is {' and '.join(kinds[0])}, {text} is {' and '.join(kinds[1])}: numbers of different "
            "kinds are not compared (--allow kind)"
        )
    one, other = _by_workload(baseline, allow), _by_workload(contender, allow)
    common = [key for key in one if key in other]
    if not common:
        raise UsageError(
            f"{base} and {text} have no workload in common: {_differences(baseline[0], contender[0])} "
            "(--allow workload)"
        )
    for key in common:
        sides, notes = [], []
        for label, found in ((base, one[key]), (text, other[key])):
            kept, repeated = _one_a_seed(label, found)
            sides.append(Side(label, kept))
            notes += [f"{label}: the newest of {repeated} repeated runs"] if repeated else []
        yield _contrast(sides[0], sides[1], metric, allow, notes)


def _by_workload(runs: list[Recorded], allow: frozenset[str]) -> dict[str, list[Recorded]]:
    found: dict[str, list[Recorded]] = defaultdict(list)
    for run in runs:
        shared = run.workload
        if allow & {"workload", "kind"}:
            shared = {"model": run.spec["group"]["name"]} if "workload" in allow else shared | {"backend": ""}
        found[json.dumps(shared, sort_keys=True)].append(run)
    return found


def _one_a_seed(label: str, runs: list[Recorded]) -> tuple[tuple[Recorded, ...], int]:
    """The newest run of each seed; runs of a seed that asked for different things are a mistake."""
    kept: dict[int, Recorded] = {}
    for run in runs:  # oldest first
        before = kept.get(run.seed)
        if before is not None and before.spec != run.spec:
            keys = [key for key in TOP if before.spec[key] != run.spec[key]] or ["settings"]
            values = " and ".join(str(one.spec.get(keys[0], "")) for one in (before, run))
            raise UsageError(
                f"{label} has runs of seed {run.seed} that differ in {keys[0]} ({values}): "
                f"add it to the selection, as in '{label},{keys[0]}={run.spec.get(keys[0], '...')}'"
            )
        kept[run.seed] = run
    return tuple(kept[seed] for seed in sorted(kept)), len(runs) - len(kept)


def _contrast(
    baseline: Side, contender: Side, metric: str, allow: frozenset[str], notes: list[str]
) -> Contrast:
    label = describe(contender.runs[0])
    apart = abs(baseline.staleness - contender.staleness)
    if apart > STALENESS_TOLERANCE:
        said = (
            f"{contender.label} realised a staleness of {contender.staleness:.2f}, {baseline.label} one of "
            f"{baseline.staleness:.2f}"
        )
        if "staleness" not in allow:
            raise UsageError(
                f"{label}: {said}, so asynchrony would be in the comparison; compare at equal bounds "
                "(staleness=0) or --allow staleness"
            )
        notes.append(f"{said}: asynchrony is in it")
    one, other = baseline.by_seed(metric), contender.by_seed(metric)
    common = sorted(one.keys() & other.keys())
    if not common:
        if "seeds" not in allow:
            raise UsageError(
                f"{label}: {baseline.label} and {contender.label} have no seed in common, so no pairs "
                "(--allow seeds compares them as independent samples)"
            )
        effect, points = compare_independent([*one.values()], [*other.values()]), {}
    else:
        if left := len(one) + len(other) - 2 * len(common):
            notes.append(f"{left} runs have no partner of their seed and are left out")
        effect = compare_paired({s: one[s] for s in common}, {s: other[s] for s in common})
        points = {seed: other[seed] / one[seed] for seed in common}
        baseline, contender = (
            Side(side.label, tuple(run for run in side.runs if run.seed in points))
            for side in (baseline, contender)
        )
    code = {run.directory.manifest.get("code_sha256") for run in (*baseline.runs, *contender.runs)}
    if len(code) > 1:
        notes.append(f"runs of {len(code)} versions of the code")
    return Contrast(
        label, str(contender.runs[0].kind), metric, baseline, contender, effect, points, tuple(notes)
    )


# ------------------------------------------------------------------------------------------- saying it


def describe(run: Recorded) -> str:
    """A workload in words: the model group, and where it differs from the shipped one."""
    group = run.spec["group"]
    name: str = group["name"]
    if name not in group_names():
        return name
    shipped = _flat(load_group(name).model_dump(mode="json"))
    changed = {key: value for key, value in _flat(group).items() if shipped.get(key) != value}
    return " ".join([name, *(f"{key}={spelled_value(value)}" for key, value in changed.items())])


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _differences(one: Recorded, other: Recorded) -> str:
    a, b = _flat(one.workload), _flat(other.workload)
    keys = [key for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
    named = [f"{key.removeprefix('group.')} ({a.get(key)}, {b.get(key)})" for key in sorted(keys)]
    return (
        "they differ in " + ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    )


@dataclass(frozen=True)
class Condition:
    """'throughput<-5%': true of a contrast that a check is to fail on."""

    text: str
    metric: str
    below: bool
    share: float

    def holds(self, contrast: Contrast) -> bool:
        change = contrast.effect.ratio - 1
        return change < self.share if self.below else change > self.share


def condition(text: str) -> Condition:
    """Raises `UsageError`."""
    found = re.fullmatch(r"([a-z-]+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise UsageError(f"--fail-on '{text}': expected METRIC<PERCENT%, as in 'throughput<-5%'")
    metric, sign, percent = found.groups()
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    return Condition(text, metric, sign == "<", float(percent) / 100)

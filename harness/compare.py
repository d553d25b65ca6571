"""Which runs are compared with which, and when that is refused.

A comparison is between runs of one kind, with one workload (model group, settings, steps, costs), seed by
seed, at equal realised staleness. What is not so is refused with the difference, unless allowed by name.

A side of it is a selection: a system, a run, or key=value with commas between.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from harness.errors import UsageError, unknown
from harness.stats import Effect, Verdict, compare_independent, compare_paired
from harness.store import Recorded
from systems.policies import ALIASES, SYSTEMS
from workloads.groups import group_names, load_group

ALLOWABLE = ("kind", "workload", "staleness", "seeds", "oversubscribed")
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

    @property
    def kind(self) -> str:
        return " and ".join(sorted({str(run.kind) for run in self.runs}))

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
            name: {
                "label": side.label,
                "kind": side.kind,
                "staleness": side.staleness,
                "runs": [run.id for run in side.runs],
            }
            for name, side in (("baseline", self.baseline), ("contender", self.contender))
        }
        effect = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self.effect).items()
        }
        return {
            "workload": self.workload, "kind": self.kind, "metric": self.metric, **sides, **effect,
            "points": self.points, "notes": list(self.notes),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------- selecting


def select(runs: Sequence[Recorded], text: str) -> list[Recorded]:
    """The runs that a selection names. Raises `UsageError` if there are none."""
    found = list(runs)
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals and ALIASES.get(part, part) not in SYSTEMS:
            exact = [run for run in found if part in (run.id, str(run.directory.path))]
            found = exact or [run for run in found if part in run.id]
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
    if key == "variant":
        return run.variant or "none (give --suite)"
    table, _, field = key.partition(".")
    tables = {name: part for name, part in spec["group"].items() if isinstance(part, dict)}
    if field in tables.get(table, {}):
        return spelled_value(tables[table][field])
    known = [
        *TOP,
        "model",
        "gpus",
        "kind",
        "variant",
        *(f"{name}.{one}" for name, part in tables.items() for one in part),
    ]
    raise unknown("selection key", key, known)


def spelled_value(value: Any) -> str:
    """700, 700.0 and '700' are one; no digit is lost."""
    text = str(value)
    if text.removesuffix(".0").lstrip("-").isdigit():
        return text.removesuffix(".0")
    try:
        return repr(float(text)).removesuffix(".0")
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------- comparing


def compare(
    runs: Sequence[Recorded], selections: Sequence[str], metric: str = "throughput",
    allow: frozenset[str] = frozenset(),
) -> list[Contrast]:  # fmt: skip
    """The first selection is the baseline of all others. Raises `UsageError` for what is not comparable."""
    return compare_sides([(text, select(runs, text)) for text in selections], metric, allow)


def compare_sides(
    sides: Sequence[tuple[str, list[Recorded]]], metric: str, allow: frozenset[str]
) -> list[Contrast]:
    """As `compare`, of runs that were selected already, under their labels."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    for name in sorted(allow):
        if name not in ALLOWABLE:
            raise unknown("--allow", name, ALLOWABLE)
    if len(sides) < 2:
        raise UsageError("compare needs a baseline and at least one other")
    found: list[Contrast] = []
    for label, contender in sides[1:]:
        found += _against(*sides[0], label, contender, metric, allow)
    return found


def _against(
    base: str, baseline: list[Recorded], text: str, contender: list[Recorded], metric: str,
    allow: frozenset[str],
) -> Iterator[Contrast]:  # fmt: skip
    kinds = tuple(" and ".join(sorted({str(run.kind) for run in runs})) for runs in (baseline, contender))
    mixed = kinds[0] != kinds[1] or " and " in kinds[0]
    if mixed and "kind" not in allow:
        raise UsageError(
            f"{base} is {kinds[0]}, {text} is {kinds[1]}: numbers of different kinds are not compared "
            "(--allow kind)"
        )
    crowded = [run.id for run in (*baseline, *contender) if run.summary.get("oversubscribed")]
    if crowded and "oversubscribed" not in allow:
        raise UsageError(
            f"{crowded[0]} had more workers than cores, so its times are not to be compared "
            "(--allow oversubscribed)"
        )
    one, other = _by_workload(baseline, allow), _by_workload(contender, allow)
    common = [key for key in one if key in other]
    if not common:
        hint = "" if "workload" in allow else " (--allow workload)"
        raise UsageError(
            f"{base} and {text} have no workload in common: {_differences(baseline[0], contender[0])}{hint}"
        )
    shared = [f"{base} is {kinds[0]}, {text} is {kinds[1]}"] if mixed else []
    shared += [f"{len(crowded)} runs had more workers than cores"] if crowded else []
    for label, mine, theirs in ((base, one, other), (text, other, one)):
        if alone := [describe(runs[0]) for key, runs in mine.items() if key not in theirs]:
            shared.append(f"left out, because only {label} has runs of it: {'; '.join(alone)}")
    for key in common:
        sides, notes = [], list(shared)
        for label, found in ((base, one[key]), (text, other[key])):
            kept, repeated = _one_a_seed(label, found)
            sides.append(Side(label, kept))
            notes += [f"{label}: the newest of {repeated + 1} equal runs of a seed"] if repeated else []
        yield _contrast(sides[0], sides[1], metric, allow, notes)


def _by_workload(runs: list[Recorded], allow: frozenset[str]) -> dict[str, list[Recorded]]:
    """With a workload that may differ, the model group is all that must be common."""
    found: dict[str, list[Recorded]] = defaultdict(list)
    for run in runs:
        shared: dict[str, Any] = run.workload
        if "workload" in allow:
            shared = {"model": run.spec["group"]["name"]}
        elif "kind" in allow:
            shared = {key: shared.get(key) for key in ("steps", "group", "trace")}
        found[json.dumps(shared, sort_keys=True)].append(run)
    return found


def _one_a_seed(label: str, runs: list[Recorded]) -> tuple[tuple[Recorded, ...], int]:
    """The newest run of each seed; runs of a seed that asked for different things are a mistake."""
    kept: dict[int, Recorded] = {}
    for run in runs:  # oldest first
        before = kept.get(run.seed)
        if before is not None and before.spec != run.spec:
            a, b = _selectable(before), _selectable(run)
            key = next((key for key in a if a[key] != b.get(key)), "system")
            raise UsageError(
                f"{label} has runs of seed {run.seed} that differ in {key} ({a.get(key)} and {b.get(key)}): "
                f"add it to the selection, as in '{label},{key}={b.get(key)}'"
            )
        kept[run.seed] = run
    return tuple(kept[seed] for seed in sorted(kept)), len(runs) - len(kept)


def _selectable(run: Recorded) -> dict[str, str]:
    """All that a selection can tell a run by."""
    group = {key: value for key, value in _flat(run.spec["group"]).items() if key.count(".") == 1}
    known = {key: spelled_value(run.spec[key]) for key in TOP}
    return known | {"model": run.spec["group"]["name"]} | {k: spelled_value(v) for k, v in group.items()}


def _contrast(
    baseline: Side, contender: Side, metric: str, allow: frozenset[str], notes: list[str]
) -> Contrast:
    label = describe(contender.runs[0])
    if (differ := describe(baseline.runs[0])) != label:
        notes.append(f"{baseline.label} ran another workload: {differ}")
    common = sorted({run.seed for run in baseline.runs} & {run.seed for run in contender.runs})
    if not common and "seeds" not in allow:
        raise UsageError(
            f"{label}: {baseline.label} and {contender.label} have no seed in common, so no pairs "
            "(--allow seeds compares them as independent samples)"
        )
    if common:
        if left := len(baseline.runs) + len(contender.runs) - 2 * len(common):
            notes.append(f"{left} runs have no partner of their seed and are left out")
        baseline, contender = (
            Side(side.label, tuple(run for run in side.runs if run.seed in common))
            for side in (baseline, contender)
        )
    if abs(baseline.staleness - contender.staleness) > STALENESS_TOLERANCE:
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
    if common:
        effect, points = compare_paired(one, other), {seed: other[seed] / one[seed] for seed in common}
    else:
        effect, points = compare_independent([*one.values()], [*other.values()]), {}
    shown = effect.low > 1 or effect.high < 1
    if shown and effect.verdict is Verdict.INCONCLUSIVE:
        notes.append("the interval excludes 1, but the rank test does not confirm it")
    manifests = [run.directory.manifest for run in (*baseline.runs, *contender.runs)]
    if (versions := len({manifest.get("code_sha256") for manifest in manifests})) > 1:
        notes.append(f"runs of {versions} versions of the code")
    if any("costs_sha256" not in manifest for manifest in manifests):
        notes.append("some runs are older than the record of the simulator's coefficients, which may differ")
    return Contrast(label, contender.kind, metric, baseline, contender, effect, points, tuple(notes))


# ------------------------------------------------------------------------------------------- saying it


def describe(run: Recorded) -> str:
    """A workload in words: the model group, and where it differs from the shipped one."""
    group = run.spec["group"]
    name: str = group["name"]
    changed = [f"{key}={value}" for key, value in changes(group).items()]
    return " ".join([name, f"{run.spec['steps']} steps", *changed])


def changes(group: Mapping[str, Any]) -> dict[str, str]:
    """Settings in which a resolved model group differs from the shipped one."""
    if group["name"] not in group_names():
        return {}
    shipped = _flat(load_group(group["name"]).model_dump(mode="json"))
    return {key: spelled_value(value) for key, value in _flat(group).items() if shipped.get(key) != value}


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

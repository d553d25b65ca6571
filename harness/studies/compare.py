"""Which runs are compared with which, and when that is refused.

A comparison is between runs that may stand side by side (`comparable.py`: one kind, one workload, equal
bounds and realised staleness), seed by seed. What is not so is refused, unless allowed by name.

A side of it is a selection: a system, a run, or key=value with commas between.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from statistics import geometric_mean
from typing import Any

from harness.errors import UsageError, unknown
from harness.results.comparable import (
    Side,
    check_cores,
    check_kinds,
    check_names,
    check_seeds,
    check_staleness,
    differences,
    flat,
    newest_of_each_seed,
    workload_of,
)
from harness.results.tables import Recorded, Replicate, reservations
from harness.studies.stats import (
    DECIDING_SHARE,
    FEWEST_FOR_A_VERDICT,
    LEVEL,
    Effect,
    OverMachines,
    Verdict,
    compare_independent,
    compare_paired,
    over_machines,
)
from systems.policies import ALIASES, SYSTEMS
from systems.types import Kind
from workloads.groups import group_names, load_group

FEW = 10  # below so many pairs the raw points are shown

# Larger is better in all of them. Throughput counts policy and judge tokens over all devices.
METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "throughput": lambda summary: summary["tokens_per_s"]["total"],
    "policy-throughput": lambda summary: summary["tokens_per_s"]["policy"],
    "judge-throughput": lambda summary: summary["tokens_per_s"]["judge"],
    "speed": lambda summary: 1 / summary["makespan_s"],
}


@dataclass(frozen=True)
class Contrast:
    """A contender against a baseline on one workload."""

    workload: str
    kind: str
    metric: str
    baseline: Side
    contender: Side
    effect: Effect
    points: dict[Replicate, float]  # ratio by seed and machine; empty where runs are not paired
    notes: tuple[str, ...]
    machines: OverMachines | None = None  # None: the nominal machine alone, or runs that are not simulated

    @property
    def by_seed(self) -> dict[int, float]:
        """The ratio of each seed: the geometric mean over its machines."""
        found: dict[int, list[float]] = defaultdict(list)
        for replicate, ratio in self.points.items():
            found[replicate.seed].append(ratio)
        return {seed: geometric_mean(ratios) for seed, ratios in found.items()}

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
            key: None if key in ("low", "high") and not self.effect.has_interval else value
            for key, value in asdict(self.effect).items()
        }
        return {
            "workload": self.workload, "kind": self.kind, "metric": self.metric, **sides, **effect,
            "points": {str(replicate): ratio for replicate, ratio in self.points.items()},
            "machines": asdict(self.machines) if self.machines else None, "notes": list(self.notes),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------- selecting


def select(runs: Sequence[Recorded], text: str) -> list[Recorded]:
    """The runs that a selection names. Raises `UsageError` if there are none."""
    found = list(runs)
    for part in text.split(","):
        key, equals, value = part.partition("=")
        is_system = ALIASES.get(part, part) in SYSTEMS or any(run.spec["system"] == part for run in runs)
        if not equals and not is_system:
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
    if key == "planner":
        return str(spec.get("planner", "none given"))
    if key == "machine":
        return str(run.replicate.machine)
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
        "machine",
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
    check_names(allow)
    if len(sides) < 2:
        raise UsageError("compare needs a baseline and at least one other")
    base, *others = (Side(label, tuple(runs)) for label, runs in sides)
    return [contrast for other in others for contrast in _against(base, other, metric, allow)]


def _against(base: Side, other: Side, metric: str, allow: frozenset[str]) -> Iterator[Contrast]:
    both = (base, other)
    shared = [*check_kinds(both, allow), *check_cores(both, allow)]
    one, two = (_by_workload(side.runs, allow) for side in both)
    common = [key for key in one if key in two]
    if not common:
        hint = "" if "workload" in allow else " (--allow workload)"
        raise UsageError(
            f"{base.label} and {other.label} have no workload in common: they "
            f"{differences(base.runs[0], other.runs[0])}{hint}"
        )
    for label, mine, theirs in ((base.label, one, two), (other.label, two, one)):
        if alone := [describe(runs[0]) for key, runs in mine.items() if key not in theirs]:
            shared.append(f"left out, because only {label} has runs of it: {'; '.join(alone)}")
    for key in common:
        sides, notes = [], list(shared)
        for label, found in ((base.label, one[key]), (other.label, two[key])):
            side, repeated = newest_of_each_seed(label, found)
            sides.append(side)
            notes += repeated
        yield _contrast(sides[0], sides[1], metric, allow, notes)


def _by_workload(runs: Sequence[Recorded], allow: frozenset[str]) -> dict[str, list[Recorded]]:
    found: dict[str, list[Recorded]] = defaultdict(list)
    for run in runs:
        found[json.dumps(workload_of(run, allow), sort_keys=True)].append(run)
    return found


def _by_replicate(side: Side, metric: str) -> dict[Replicate, float]:
    return {run.replicate: METRICS[metric](run.summary) for run in side.runs}


def _contrast(
    baseline: Side, contender: Side, metric: str, allow: frozenset[str], notes: list[str]
) -> Contrast:
    label = describe(contender.runs[0])
    both = {run.replicate for run in baseline.runs} & {run.replicate for run in contender.runs}
    if len({one.machines for one in both}) > 1:  # those of one hypercube belong together
        most = max(one.machines for one in both)
        notes.append(f"only pairs on one of {most} machines; the nominal one is machine=0")
        baseline, contender = (
            Side(side.label, tuple(run for run in side.runs if run.replicate.machines == most))
            for side in (baseline, contender)
        )
    if (differ := describe(baseline.runs[0])) != label:
        notes.append(f"{baseline.label} ran another workload: {differ}")
    common = sorted({run.replicate for run in baseline.runs} & {run.replicate for run in contender.runs})
    check_seeds((baseline, contender), allow, label)
    if common:
        if left := len(baseline.runs) + len(contender.runs) - 2 * len(common):
            notes.append(f"{left} runs have no partner of their seed and machine and are left out")
        baseline, contender = (
            Side(side.label, tuple(run for run in side.runs if run.replicate in common))
            for side in (baseline, contender)
        )
    notes += check_staleness((baseline, contender), allow, label)
    one, other = _by_replicate(baseline, metric), _by_replicate(contender, metric)
    machines: OverMachines | None = None
    points: dict[Replicate, float] = {}
    if common:
        points = {replicate: other[replicate] / one[replicate] for replicate in common}
        effect, machines = paired_effect(points)
    else:
        effect = compare_independent([*one.values()], [*other.values()])
    if effect.n < FEWEST_FOR_A_VERDICT[effect.paired]:
        notes.append(
            f"no verdict was possible: with {_counted(effect)} no rank "
            f"test reaches p < {LEVEL}, {FEWEST_FOR_A_VERDICT[effect.paired]} are needed"
        )
    elif (effect.low > 1 or effect.high < 1) and effect.p is not None and effect.p >= LEVEL:
        notes.append("the interval excludes 1, but the rank test does not confirm it")
    runs = (*baseline.runs, *contender.runs)
    if machines is None and contender.runs[0].kind is not Kind.MEASURED:
        notes.append(
            "on the nominal machine alone: what other plausible coefficients would give is not in it "
            "(machines = N in a suite, or bench run --machines N)"
        )
    elif machines is not None and machines.share < DECIDING_SHARE:
        notes.append(
            f"no verdict: on {1 - machines.share:.0%} of the machines it is the other way round, and "
            f"{DECIDING_SHARE:.0%} must agree"
        )
    notes += reservations(runs)
    return Contrast(
        label, contender.kind, metric, baseline, contender, effect, points, tuple(notes), machines
    )


def paired_effect(points: Mapping[Replicate, float]) -> tuple[Effect, OverMachines | None]:
    """Ratios by seed and machine: the effect over seeds, each averaged over machines, and how machines
    differ.

    Where machines were drawn, a verdict needs `DECIDING_SHARE` of them, too.
    """
    by_seed: dict[int, list[float]] = defaultdict(list)
    by_machine: dict[int, list[float]] = defaultdict(list)
    for replicate, ratio in points.items():
        by_seed[replicate.seed].append(ratio)
        by_machine[replicate.machine].append(ratio)
    means = {seed: geometric_mean(ratios) for seed, ratios in by_seed.items()}
    effect = compare_paired(dict.fromkeys(means, 1.0), means)
    if set(by_machine) == {0}:
        return effect, None
    machines = over_machines(by_machine)
    if machines.share < DECIDING_SHARE:
        effect = replace(effect, verdict=Verdict.INCONCLUSIVE)
    return effect, machines


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
    shipped = flat(load_group(group["name"]).model_dump(mode="json"))
    return {key: spelled_value(value) for key, value in flat(group).items() if shipped.get(key) != value}


def _counted(effect: Effect) -> str:
    """ "5 pairs", "1 run a side"."""
    thing, more = ("pair", "") if effect.paired else ("run", " a side")
    return f"{effect.n} {thing}{'' if effect.n == 1 else 's'}{more}"


class Part(StrEnum):
    """What of an effect a condition looks at."""

    ESTIMATE = "estimate"
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True)
class Condition:
    """'throughput<-5%': true of a contrast that a check is to fail on.

    It looks at the point estimate, whatever its interval; 'throughput.high<-5%' at the interval's upper end,
    and so fires only if the whole interval is below; 'throughput.low' is the lower end.
    """

    text: str
    metric: str
    part: Part
    below: bool
    share: float

    def holds(self, contrast: Contrast) -> bool:
        """Raises `UsageError` where the contrast has no interval, so that its end could never fire."""
        effect = contrast.effect
        value = {Part.ESTIMATE: effect.ratio, Part.LOW: effect.low, Part.HIGH: effect.high}[self.part]
        if not effect.has_interval and self.part is not Part.ESTIMATE:
            raise UsageError(
                f"--fail-on '{self.text}': {_counted(effect)} on {contrast.workload}, which is too few "
                "for an interval; give more seeds"
            )
        return value - 1 < self.share if self.below else value - 1 > self.share

    def said(self, contrast: Contrast) -> str:
        """Why it fired, with what it looked at."""
        effect = contrast.effect
        interval = f"{100 * (1 - LEVEL):.0f} % interval {effect.low - 1:+.1%} to {effect.high - 1:+.1%}"
        if not effect.has_interval:
            interval = "no interval"
        looked = "the point estimate" if self.part is Part.ESTIMATE else f"the interval's {self.part} end"
        return (
            f"{self.text}: {contrast.contender.label} is {effect.ratio - 1:+.1%} in {self.metric} on "
            f"{contrast.workload} ({interval}; {effect.verdict}); the condition is of {looked}"
        )


def condition(text: str) -> Condition:
    """Raises `UsageError`."""
    found = re.fullmatch(r"([a-z-]+)(?:\.([a-z]+))?\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise UsageError(f"--fail-on '{text}': expected METRIC<PERCENT%, as in 'throughput<-5%'")
    metric, part, sign, percent = found.groups()
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    if part is not None and part not in (Part.LOW, Part.HIGH):
        raise unknown("end of an interval", part, [Part.LOW, Part.HIGH])
    return Condition(text, metric, Part(part or Part.ESTIMATE), sign == "<", float(percent) / 100)

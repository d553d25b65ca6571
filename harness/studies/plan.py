"""What a run or a suite would ask for, before it is run: lengths, memory, cells, time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UsageError
from harness.runs.assemble import longest_context
from harness.runs.costs import modelled
from harness.runs.spec import RunSpec
from harness.studies.suite import Suite
from harness.studies.sweep import Forecast, ledger
from systems.costs.cost import ServingCost
from systems.costs.memory import TRAIN_STATE_BYTES, weight_bytes
from systems.types import SERVING, Role
from workloads.synthetic import SyntheticWorkload

PERCENTILES = (50, 95, 99)
GROUPS = 400  # of prompts drawn for the table
GB = 1e9


@dataclass(frozen=True)
class Lengths:
    """Tokens: percentiles, mean, and the share that is cut at the cap."""

    what: str
    percentiles: dict[str, float]
    mean: float
    at_cap: float


def lengths(spec: RunSpec) -> list[Lengths]:
    """Lengths of prompts, responses and judgements at the first step, and of responses at the last one."""
    group, recipe = spec.group, spec.group.workload
    workload = SyntheticWorkload(
        group.lengths, spec.seed, recipe.samples, recipe.judge_calls, recipe.prompts, spec.trace
    )
    prompts, responses, judgements = _drawn(workload, 0, min(GROUPS, recipe.prompts))
    last = (spec.steps - 1) * recipe.prompts
    _, late, _ = _drawn(workload, last, last + min(GROUPS, recipe.prompts))
    caps = group.lengths
    return [
        _row("prompt", prompts, 1024),
        _row("response, first step", responses, caps.response_cap),
        _row("response, last step", late, caps.response_cap),
        *([_row("judgement", judgements, caps.judge_cap)] if judgements else []),
    ]


def _drawn(workload: SyntheticWorkload, first: int, last: int) -> tuple[list[int], list[int], list[int]]:
    drawn = [workload.lengths_of(group) for group in range(first, last)]
    responses = [length for _, listed, _ in drawn for length in listed]
    judgements = [call for _, _, judged in drawn for calls in judged for call in calls]
    return [prompt for prompt, _, _ in drawn], responses, judgements


def _row(what: str, found: list[int], cap: int) -> Lengths:
    values = np.asarray(found)
    named = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return Lengths(what, named, float(values.mean()), float((values >= cap).mean()))


def memory(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """What a replica of each role holds, and the smallest training unit."""
    cost, longest = modelled(spec.group, real=False, on=spec.machine), longest_context(spec)
    found: dict[str, dict[str, Any]] = {}
    for role in SERVING:
        one: ServingCost = cost.serving[role]
        found[role] = {
            "model": one.label,
            "weights_gb": weight_bytes(one.architecture, one.tp) / GB,
            "kv_tokens": one.kv_capacity_tokens,
            "longest_sequence_tokens": longest[role],
            "longest_sequences_at_once": max(0, one.kv_capacity_tokens // longest[role]),
        }
    policy = cost.training.architecture
    found[Role.TRAIN] = {
        "model": policy.name,
        "state_gb": policy.params_total * TRAIN_STATE_BYTES / GB,
        "smallest_unit_devices": cost.training.smallest_unit,
    }
    return found


NONE_YET = {"cells": 0, "done": 0, "failed": 0}


def plan_suite(suite: Suite, root: Path, jobs: int) -> dict[str, Any]:
    """Cells by system, model, variant and bound; what is done, what fits, and how long the rest takes."""
    found, forecast = ledger(suite, root), Forecast(root)
    rows: dict[str, dict[str, Any]] = {}
    for cell in suite.cells:
        spec = cell.spec
        names = {
            "system": spec.system, "model": spec.group.name, "variant": cell.variant,
            "settings": list(cell.settings), "staleness": spec.staleness,
            "machines": spec.machine.of if spec.machine else 0,
        }  # fmt: skip
        nominal = spec.model_copy(update={"machine": None})  # machines are replicates, as seeds are
        row = rows.setdefault(f"{nominal.digest} {spec.machine is None}", {**names, **NONE_YET})
        row["cells"] += 1
        row["done"] += cell.id in found.done
        row["failed"] += cell.id in found.failed
    to_do = found.to_do(suite.cells, retry=False)
    times = [forecast.wall_s(cell.spec) for cell in to_do]
    known = [seconds for seconds in times if seconds is not None]
    fits: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in {cell.spec.digest: cell for cell in suite.cells if not cell.spec.on.measured}.values():
        name = cell.spec.group.name
        fits[name] = _tightest(fits.get(name), memory(cell.spec))
    return {
        "suite": suite.name,
        "about": suite.about,
        "cells": len(suite.cells),
        "to_do": len(to_do),
        "other_code": len(found.other_code),
        "jobs": jobs,
        "seconds": sum(known) / jobs if len(known) == len(times) else None,
        "rows": list(rows.values()),
        "memory": {name: _fits(found) for name, found in fits.items()},
    }


def _tightest(
    one: dict[str, dict[str, Any]] | None, other: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Role by role, the cell with the least room."""
    if one is None:
        return other

    def room(facts: dict[str, Any]) -> float:
        return float(facts.get("longest_sequences_at_once", -facts.get("smallest_unit_devices", 0)))

    return {role: min(one[role], other[role], key=room) for role in other}


def _fits(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Memory in a phrase a role."""
    said = {
        role: f"{facts['longest_sequences_at_once']} of the longest sequences a replica"
        for role, facts in found.items()
        if "kv_tokens" in facts
    }
    return said | {Role.TRAIN: f"at least {found[Role.TRAIN]['smallest_unit_devices']} devices"}


def plan(spec: RunSpec) -> dict[str, Any]:
    """Raises `UsageError` for a real backend, whose lengths are not known beforehand."""
    if spec.on.real:
        raise UsageError(f"--backend {spec.backend}: a plan is for simulated runs; give --backend sim")
    return {
        "system": spec.system,
        "model": spec.group.name,
        "gpus": spec.group.cluster.gpus,
        "lengths": [
            {"what": row.what, **row.percentiles, "mean": row.mean, "at_cap": row.at_cap}
            for row in lengths(spec)
        ],
        "memory": memory(spec),
    }

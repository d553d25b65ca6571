"""The headline suite is frozen: what its cells resolve to, and the costs that they are simulated with.

A failure here means that a claim's basis has moved. If that is meant, docs/decisions/ gets a page that says
why and what it changed, and the digests below follow. If only a field with its default was added to model
groups, say so in the commit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter

from harness.runs.costs import costs_sha256, modelled
from harness.studies.suite import load_suite
from systems.policies import SYSTEMS
from systems.types import SERVING
from workloads.groups import load_group
from workloads.synthetic import SyntheticWorkload

REQUESTS = "28f0c6a7128a0331d97305e0227308702ded7862d14409c028140b0ffa63a3c4"
COSTS = "39253043d15dd06d670af1b4ff1ed758bcb1dca610116df676c215872b0c8574"
DURATIONS = "565489804d456f536d92f0e6b19685090f6b0729138a5acd826a691fa14d6d88"
LENGTHS = "f1dda3d5eaea0b65cd69a7d17e5479113c2a4b997605298795f91c5576c30810"


def test_what_is_asked_for_is_frozen() -> None:
    requests = sorted(
        json.dumps(cell.spec.to_json(), sort_keys=True) for cell in load_suite("headline").cells
    )
    assert hashlib.sha256("\n".join(requests).encode()).hexdigest() == REQUESTS


def test_what_it_costs_is_frozen() -> None:
    assert costs_sha256() == COSTS


def probes(name: str) -> list[float]:
    """A few numbers that every duration of a group hangs on."""
    cost = modelled(load_group(name), real=False)
    one, training = cost.serving, cost.training
    return [
        training.device_s(10_000, 5e7), training.step_s(8), training.smallest_unit, cost.copy_s(1e9, 1),
        cost.copy_s(1e9, 8), cost.publish_s(16), cost.update_s(), cost.warm_shift_s(),
        *(one[role].token_s(n) for role in SERVING for n in (1, 64)),
        *(one[role].kv_s(64) for role in SERVING), *(one[role].prefill_s(5000) for role in SERVING),
        *(one[role].kv_capacity_tokens for role in SERVING),
    ]  # fmt: skip


def test_what_the_code_makes_of_it_is_frozen() -> None:
    """Coefficients do not say what is done with them: durations of each group, to nine digits."""
    groups = sorted({cell.spec.group.name for cell in load_suite("headline").cells})
    text = json.dumps([[name, [f"{value:.9g}" for value in probes(name)]] for name in groups])
    assert hashlib.sha256(text.encode()).hexdigest() == DURATIONS


def test_the_lengths_that_are_drawn_are_frozen() -> None:
    drawn = []
    for cell in load_suite("headline").cells:
        if cell.spec.seed == 21 and 0 in cell.grids and cell.spec.staleness == 0:
            step = cell.spec.group.workload
            work = SyntheticWorkload(
                cell.spec.group.lengths, 21, step.samples, step.judge_calls, step.prompts
            )
            drawn.append([cell.spec.system, cell.spec.group.name, cell.variant or "", work.lengths_of(130)])
    assert len(drawn) == len(SYSTEMS) * 4 * 3
    by_work = {json.dumps([name, variant, lengths]) for _, name, variant, lengths in drawn}
    assert len(by_work) == 4 * 3, "every system draws the same"
    assert hashlib.sha256("\n".join(sorted(by_work)).encode()).hexdigest() == LENGTHS


def test_every_system_gets_the_same_work() -> None:
    """At its default and at equal staleness, each system has the same groups, priors and seeds."""
    cells = load_suite("headline").cells
    work = Counter(cell.spec.system for cell in cells if 0 in cell.grids and cell.spec.staleness == 0)
    assert work == dict.fromkeys(SYSTEMS, 4 * 3 * 8)
    assert {cell.spec.seed for cell in cells} == set(range(21, 29))
    machines = Counter(cell.spec.system for cell in cells if cell.spec.machine)
    assert machines == dict.fromkeys(SYSTEMS, 4 * 8 * 8)

"""The headline suite is frozen: what its cells resolve to, and the costs that they are simulated with.

A failure here means that a claim's basis has moved. If that is meant, docs/decisions/ gets a page that says
why and what it changed, and the digests below follow. If only a field with its default was added to model
groups, say so in the commit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter

from harness.suite import load_suite
from workloads.groups import costs_sha256

REQUESTS = "a8cb320124ad6c3302051c40b715c3b590cfc8c96ae5e5982fa6e8387a59ab74"
COSTS = "2581155a00b11f65403ff2eb9d9f8f103ad2c63c9e4e8d1b914cc799aa8e9c24"


def test_what_is_asked_for_is_frozen() -> None:
    requests = sorted(
        json.dumps(cell.spec.to_json(), sort_keys=True) for cell in load_suite("headline").cells
    )
    assert hashlib.sha256("\n".join(requests).encode()).hexdigest() == REQUESTS


def test_what_it_costs_is_frozen() -> None:
    assert costs_sha256() == COSTS


def test_every_system_gets_the_same_work() -> None:
    """At its default and at equal staleness, each system has the same groups, priors and seeds."""
    cells = load_suite("headline").cells
    work = Counter(cell.spec.system for cell in cells if 0 in cell.grids and cell.spec.staleness == 0)
    assert set(work.values()) == {4 * 3 * 8}
    assert {cell.spec.seed for cell in cells} == set(range(11, 19))

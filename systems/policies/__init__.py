"""The systems under test: one small file each, found by name.

A policy module has a class with `name`, `default_staleness`, `time_shares`, `begin` and `plan`. Adding a
system means adding a file here and a line to `SYSTEMS`; nothing else knows systems by name.
"""

from __future__ import annotations

from typing import Any

from systems.policies.colocated import Colocated
from systems.policies.disaggregated import Disaggregated
from systems.policies.pivot import Pivot
from systems.policies.planners import PLANNERS
from systems.policies.rollout_reward import RolloutReward
from systems.policies.trainer_pool import TrainerPool
from systems.types import Policy

SYSTEMS: dict[str, type[Policy[Any]]] = {
    "colocated": Colocated,
    "disaggregated": Disaggregated,
    "rollout-reward": RolloutReward,
    "trainer-pool": TrainerPool,
    "pivot": Pivot,
}
ALIASES = {"shiftable": "pivot"}


def takes_planner(kind: type[Policy[Any]]) -> bool:
    """Does this system ask a planner which split to have?"""
    return issubclass(kind, Pivot)


def policy_of(kind: type[Policy[Any]], planner: str | None = None) -> Policy[Any]:
    """A system, with the planner of this name where it takes one."""
    if planner is not None and issubclass(kind, Pivot):
        return kind(PLANNERS[planner]())
    return kind()

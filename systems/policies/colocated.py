"""Colocated: all devices do the same, phase by phase: roll out, judge, train, and again."""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import static_split
from systems.types import Layout, Plan, Role, View

ORDER = (Role.ROLLOUT, Role.REWARD, Role.TRAIN)


@dataclass(frozen=True, slots=True)
class Phase:
    """What all devices are doing."""

    role: Role = Role.ROLLOUT


class Colocated:
    """Stays in a phase until it has no work left, then goes to the next one that has."""

    name = "colocated"
    default_staleness = 0
    time_shares = True

    def begin(self, layout: Layout) -> Phase:
        return Phase()

    def plan(self, view: View, memory: Phase) -> tuple[Plan, Phase]:
        role = memory.role
        if not _has_work(view, role):
            start = ORDER.index(role)
            following = (ORDER[(start + i) % len(ORDER)] for i in range(1, len(ORDER) + 1))
            role = next((candidate for candidate in following if _has_work(view, candidate)), role)
        split = dict.fromkeys(Role, 0) | {role: len(view.layout.devices)}
        return Plan(static_split(view.layout, split), why=f"phase {role}"), Phase(role)


def _has_work(view: View, role: Role) -> bool:
    if role is Role.TRAIN:
        return view.training.batch_ready or view.training.started_ns is not None
    return view.outstanding(role) > 0

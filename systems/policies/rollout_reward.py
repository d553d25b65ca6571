"""Rollout-reward: rollout and judge time-share one pool, phase by phase; training has devices of its own."""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import static_split
from systems.types import SERVING, Layout, Plan, Role, View


@dataclass(frozen=True, slots=True)
class Phase:
    """What the shared pool is doing."""

    role: Role = Role.ROLLOUT


class RolloutReward:
    """The pool stays in a phase until it has no work left, then goes to the other if that has any. The pool
    has the template's devices of both roles."""

    name = "rollout-reward"
    default_staleness = 2
    time_shares = False

    def begin(self, layout: Layout) -> Phase:
        return Phase()

    def plan(self, view: View, memory: Phase) -> tuple[Plan, Phase]:
        role = memory.role
        other = Role.REWARD if role is Role.ROLLOUT else Role.ROLLOUT
        if not view.outstanding(role) and view.outstanding(other):
            role = other
        template = view.layout.template
        pool = sum(template[serving] for serving in SERVING)
        split = {Role.TRAIN: template[Role.TRAIN], Role.ROLLOUT: 0, Role.REWARD: 0} | {role: pool}
        return Plan(static_split(view.layout, split), why=f"phase {role}"), Phase(role)

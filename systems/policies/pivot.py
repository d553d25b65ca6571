"""Pivot: blocks of devices shift among rollout, reward and training whenever that pays.

The planner forecasts the time of the next two publishes for a few splits; this policy keeps the roles
of blocks, asks the planner at most once a cooldown, and lets the training unit come and go as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import count, place_blocks, template_roles
from systems.policies.planner import balance, choose, rearrange, stuck
from systems.types import NS_PER_S, Layout, Plan, Role, View

# Between changes of mind, in shifts, so that it means the same where a shift takes milliseconds. The template
# waits 10 s (artifact-template), which is three of the simulated cluster's.
COOLDOWN_SHIFTS = 3.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """The role of each block, when one last changed, and the balanced split to fall back on.

    The latter is looked for once a version, while nothing is being trained on.
    """

    roles: tuple[Role, ...]
    base: tuple[tuple[Role, int], ...]
    changed_ns: int | None = None
    base_version: int = -1


class Pivot:
    """Resource-shiftable organisation."""

    name = "pivot"
    default_staleness = 2
    time_shares = True

    def begin(self, layout: Layout) -> Blocks:
        roles = template_roles(layout)
        return Blocks(roles, tuple(count(roles).items()))

    def plan(self, view: View, memory: Blocks) -> tuple[Plan, Blocks]:
        cooldown_ns = round(COOLDOWN_SHIFTS * view.estimates.shift_s * NS_PER_S)
        rested_ns = (memory.changed_ns + cooldown_ns) if memory.changed_ns is not None else 0
        if view.shifting or (view.now_ns < rested_ns and not stuck(view, count(memory.roles))):
            revisit = rested_ns if view.now_ns < rested_ns else None
            return Plan(place_blocks(view.layout, memory.roles), why="cooldown", revisit_ns=revisit), memory
        now, base, base_version = count(memory.roles), dict(memory.base), memory.base_version
        if base_version < view.training.version and view.training.started_ns is None:
            base, base_version = dict(balance(view, now, base)), view.training.version
        choice = choose(view, now, base)
        roles = rearrange(view, memory.roles, choice.split)
        changed_ns = view.now_ns if roles != memory.roles else memory.changed_ns
        memory = Blocks(roles, tuple(base.items()), changed_ns, base_version)
        return Plan(place_blocks(view.layout, roles), why=choice.why), memory

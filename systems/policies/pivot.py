"""Pivot: blocks of devices shift among rollout, reward and training whenever that pays.

A planner says which split to have; this policy says which blocks change for it, keeps it from changing its
mind while a shift is under way or has just ended, and lets the training unit come and go as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systems.policies.layouts import Split, count, place_blocks, template_roles
from systems.policies.planners import DEFAULT_PLANNER, PLANNERS, Planner
from systems.types import NS_PER_S, Layout, LeaseState, Plan, Role, View


@dataclass(frozen=True, slots=True)
class Blocks:
    """The role of each block, when one last changed, and the planner's memory."""

    roles: tuple[Role, ...]
    planner: Any
    changed_ns: int | None = None


class Pivot:
    """Resource-shiftable organisation."""

    name = "pivot"
    default_staleness = 2
    time_shares = True

    def __init__(self, planner: Planner[Any] | None = None) -> None:
        self.planner = planner or PLANNERS[DEFAULT_PLANNER]()

    def begin(self, layout: Layout) -> Blocks:
        return Blocks(template_roles(layout), self.planner.begin())

    def plan(self, view: View, memory: Blocks) -> tuple[Plan, Blocks]:
        tick_ns = view.now_ns + round(self.planner.tick_s * NS_PER_S)
        rest_ns = round(self.planner.cooldown_shifts * view.estimates.shift_s * NS_PER_S)
        rested_ns = memory.changed_ns + rest_ns if memory.changed_ns is not None else 0
        urgent = view.training.batch_ready and view.training.started_ns is None
        if view.shifting or (view.now_ns < rested_ns and not urgent):
            again_ns = max(rested_ns, view.now_ns + NS_PER_S)
            return Plan(place_blocks(view.layout, memory.roles), why="cooldown", revisit_ns=again_ns), memory
        now = count(memory.roles)
        split, why, kept = self.planner.choose(view, now, memory.planner)
        roles = rearrange(view, memory.roles, split) if split != now else memory.roles
        changed_ns = view.now_ns if roles != memory.roles else memory.changed_ns
        placements = place_blocks(view.layout, roles)
        return Plan(placements, why=why, revisit_ns=tick_ns), Blocks(roles, kept, changed_ns)


def rearrange(view: View, roles: Sequence[Role], split: Split) -> tuple[Role, ...]:
    """Block roles with the counts of `split` that differ from `roles` as little as possible.

    Of a donor's blocks those with the fewest running sequences go first; ties by position.
    """
    changed = list(roles)
    load = _block_load(view)
    have = count(roles)
    spare = [
        index
        for role in Role
        for index in sorted(
            (i for i, r in enumerate(roles) if r is role), key=lambda i: (load.get(i, 0), -i)
        )[: max(0, have.of(role) - split.of(role))]
    ]
    for role in Role:
        for _ in range(max(0, split.of(role) - have.of(role))):
            changed[spare.pop(0)] = role
    return tuple(changed)


def _block_load(view: View) -> dict[int, int]:
    """Running sequences by block."""
    first = view.layout.devices[0].id
    load: dict[int, int] = {}
    for replica in view.replicas:
        if replica.state is LeaseState.ACTIVE:
            for device in replica.placement.devices:
                index = (device - first) // view.layout.block
                load[index] = load.get(index, 0) + replica.running
    return load

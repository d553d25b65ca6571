"""From what is to what should be: the shifts that turn the current placements into a plan. Pure.

Placements that are in both are left alone. The others are joined where they share devices, and every
connected part is one `Shift`: small enough to run beside the others, and always legal on its own,
because no device outside of it is touched. Training is one unit: where it goes and where it comes from
are in one part, even if they share no device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from systems.lifecycle import check_plan
from systems.types import Placement, Plan, Role, Shift

THE_UNIT = -1  # stands for the training unit beside device ids


def reconcile(
    current: Sequence[Placement],
    plan: Plan,
    *,
    busy: Collection[int] = (),
    down: Collection[int] = (),
    first_id: int = 0,
) -> tuple[Shift, ...]:
    """Shifts that may start now, in device order.

    `busy` devices have a shift under way: parts that touch one wait for it. A target on a `down`
    device waits until the device is back; its sources are then left alone as well.
    """
    check_plan(plan.placements)
    wanted = frozenset(plan.placements)
    have = frozenset(current)
    sources = sorted(placement for placement in have if placement not in wanted)
    targets = sorted(placement for placement in wanted if placement not in have)
    shifts: list[Shift] = []
    for part in _connected(sources + targets):
        devices = {device for placement in part for device in placement.devices}
        part_targets = tuple(sorted(placement for placement in part if placement in wanted))
        blocked = any(device in busy for device in devices) or any(
            device in down for placement in part_targets for device in placement.devices
        )
        if not blocked:
            part_sources = tuple(sorted(placement for placement in part if placement not in wanted))
            shifts.append(Shift(first_id + len(shifts), part_sources, part_targets, plan.how))
    return tuple(shifts)


def _connected(placements: Iterable[Placement]) -> list[list[Placement]]:
    """Parts of `placements` that are linked by shared devices, ordered by their first device."""
    part_of: dict[int, list[Placement]] = {}  # device (or the unit) -> the part that holds it
    for placement in placements:
        joined = [placement]
        for part in {id(part_of[d]): part_of[d] for d in _holds(placement) if d in part_of}.values():
            joined.extend(part)
        for member in joined:
            for device in _holds(member):
                part_of[device] = joined
    unique = {id(part): part for _, part in sorted(part_of.items())}
    return list(unique.values())


def _holds(placement: Placement) -> tuple[int, ...]:
    """What only one part may hold: devices, and the training unit."""
    return (*placement.devices, THE_UNIT) if placement.role is Role.TRAIN else placement.devices

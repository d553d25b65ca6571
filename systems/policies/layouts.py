"""From counts to placements: which devices a split gives to which role. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from systems.types import SERVING, Layout, Placement, Role


class Split(NamedTuple):
    """Blocks a role, in the order of `Role`."""

    rollout: int
    reward: int
    train: int

    def of(self, role: Role) -> int:
        count: int = getattr(self, role)
        return count


def replicas(devices: Sequence[int], role: Role, width: int) -> tuple[Placement, ...]:
    """Consecutive devices cut into replicas of `width`; a remainder stays unused."""
    whole = len(devices) - len(devices) % width
    return tuple(Placement(role, tuple(devices[i : i + width])) for i in range(0, whole, width))


def place(layout: Layout, owned: Mapping[Role, Sequence[int]]) -> tuple[Placement, ...]:
    """Placements for the devices that each role owns: one training unit, and replicas."""
    placements: list[Placement] = []
    if owned.get(Role.TRAIN):
        placements.append(Placement(Role.TRAIN, tuple(owned[Role.TRAIN])))
    for role in SERVING:
        placements.extend(replicas(owned.get(role, ()), role, layout.width[role]))
    return tuple(sorted(placements))


def static_split(layout: Layout, devices: Mapping[Role, int]) -> tuple[Placement, ...]:
    """Train first, then rollout, then reward, in device order."""
    ids = [device.id for device in layout.devices]
    owned: dict[Role, Sequence[int]] = {}
    start = 0
    for role in (Role.TRAIN, Role.ROLLOUT, Role.REWARD):
        owned[role] = ids[start : start + devices[role]]
        start += devices[role]
    return place(layout, owned)


def blocks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The devices in blocks, each of which any role can take over whole."""
    ids = [device.id for device in layout.devices]
    size = layout.block
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids) - len(ids) % size, size))


def place_blocks(layout: Layout, roles: Sequence[Role]) -> tuple[Placement, ...]:
    """Placements when block i works on `roles[i]`."""
    owned: dict[Role, list[int]] = {role: [] for role in Role}
    for block, role in zip(blocks(layout), roles, strict=True):
        owned[role].extend(block)
    return place(layout, owned)


def template_roles(layout: Layout) -> tuple[Role, ...]:
    """The template split, block by block."""
    roles: list[Role] = []
    for role in (Role.TRAIN, Role.ROLLOUT, Role.REWARD):
        roles.extend([role] * (layout.template[role] // layout.block))
    return tuple(roles)


def count(roles: Iterable[Role]) -> Split:
    """Blocks a role."""
    listed = list(roles)
    return Split(*(listed.count(role) for role in Role))

"""From a model group's cluster table to a layout: how many devices there are, and who starts where.

A system that time-shares devices runs on fewer than the three roles need side by side; a static one does not.
"""

from __future__ import annotations

import math

from harness.errors import UsageError
from systems.types import SERVING, Device, Layout, Role
from workloads.groups import ModelGroup


def layout_of(group: ModelGroup, train_min: int, time_shares: bool) -> Layout:
    """Raises `UsageError` if the roles do not fit on the devices."""
    cluster = group.cluster
    layout = Layout(
        devices=tuple(Device(i, i // cluster.gpus_per_node, cluster.hardware) for i in range(cluster.gpus)),
        width={Role.ROLLOUT: group.pair.policy_tp, Role.REWARD: _judge_width(group), Role.TRAIN: 1},
        template={Role.TRAIN: cluster.train, Role.ROLLOUT: cluster.rollout, Role.REWARD: cluster.reward},
        train_min=train_min,
    )
    total = sum(layout.template.values())
    needed = smallest_cluster(group, train_min, time_shares)
    if total != cluster.gpus and cluster.gpus >= needed and total < cluster.gpus:
        raise UsageError(
            f"cluster.gpus={cluster.gpus}: the split train {cluster.train}, rollout {cluster.rollout}, "
            f"reward {cluster.reward} adds up to {total}; --gpus N scales all of them"
        )
    if cluster.gpus < needed or total > cluster.gpus:
        raise UsageError(
            f"cluster.gpus={cluster.gpus}: the layout needs "
            f"{max(needed, total)} (train {max(cluster.train, train_min)}, rollout "
            f"{cluster.rollout}, reward {cluster.reward})"
        )
    side_by_side = cluster.gpus >= smallest_cluster(group, train_min, time_shares=False)
    for role, devices in layout.template.items():
        idle = role is Role.REWARD and not group.workload.judge_calls  # nobody judges
        if devices % layout.block or (devices == 0 and side_by_side and not idle):
            raise UsageError(
                f"cluster.{role}={devices}: must be a positive multiple of {layout.block} devices, the "
                "widest replica"
            )
    if side_by_side and cluster.train < train_min:
        raise UsageError(
            f"cluster.train={cluster.train}: the training state of {group.pair.policy} needs "
            f"{train_min} devices"
        )
    return layout


def smallest_cluster(group: ModelGroup, train_min: int, time_shares: bool) -> int:
    """Devices that all roles need: one after the other, or side by side."""
    block = _block(group)
    train = math.ceil(train_min / block)
    return block * (train if time_shares else train + len(_serving_roles(group)))


def scaled_split(group: ModelGroup, gpus: int, train_min: int, time_shares: bool) -> dict[str, int]:
    """The template split on another number of devices, in whole blocks.

    No role is left without one unless there are too few for all; then training and rollout
    share them to begin with.
    """
    block = _block(group)
    needed = smallest_cluster(group, train_min, time_shares)
    if gpus < needed:
        served = ", ".join(f"{role} {block}" for role in _serving_roles(group))
        train_alone = needed - len(_serving_roles(group)) * block
        side = f" (train {train_alone}, {served})" if not time_shares else ""
        raise UsageError(f"--gpus {gpus}: {group.name} needs at least {needed}{side}")
    if gpus % block:
        below = gpus - gpus % block
        raise UsageError(f"--gpus {gpus}: must be a multiple of {block}; nearest: {below} or {below + block}")
    total, train = gpus // block, math.ceil(train_min / block)
    if total < train + len(_serving_roles(group)):
        return {"train": total // 2 * block, "rollout": (total - total // 2) * block, "reward": 0}
    least = {"train": train, "rollout": 1, "reward": int(Role.REWARD in _serving_roles(group))}
    share = {role: getattr(group.cluster, role) / group.cluster.gpus * total for role in least}
    split = {role: max(least[role], math.floor(share[role])) for role in least}
    while sum(split.values()) < total:
        split[max(split, key=lambda role: share[role] - split[role])] += 1
    while sum(split.values()) > total:
        donors = [role for role in split if split[role] > least[role]]
        split[max(donors, key=lambda role: split[role] - share[role])] -= 1
    return {role: blocks * block for role, blocks in split.items()}


def _serving_roles(group: ModelGroup) -> tuple[Role, ...]:
    """Nobody judges where a rule gives the reward."""
    return SERVING if group.workload.judge_calls else (Role.ROLLOUT,)


def _judge_width(group: ModelGroup) -> int:
    return group.pair.judge_tp if group.workload.judge_calls else group.pair.policy_tp


def _block(group: ModelGroup) -> int:
    return max(group.pair.policy_tp, _judge_width(group))

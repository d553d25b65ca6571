"""What the cluster could do now, as a few numbers: the fluid model that planners reason with. Pure.

A serving role with N outstanding sequences on b blocks has m = b * (replicas a block) replicas, each with
n = min(N / m, what fits) sequences, which take ITL(n) a token. It completes m * n / (L * ITL(n)) sequences
a second. To compare roles, a completed sequence is worth w, the device-seconds that it takes at a full
batch; so the *value* of b blocks,

    V(b, N) = w * m * n / (L * ITL(n))            and w * N / (L * ITL(1)) where N < m,

is useful reference device-seconds done a second. V is concave in b: the first blocks are the most useful.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from systems.estimates.lengths import LEVELS
from systems.types import NS_PER_S, Role, Speed, View

CELLS = 96  # of a role's survival table: finer than a forecast's own error
LEAST_SURVIVAL = 1e-4  # beyond it nobody is left


class RoleModel:
    """One serving role: how fast sequences get on, what they are worth, and how many outlive a length.

    `itl[n]` is seconds a token with n sequences a replica at the mean context; `worth` is device-seconds.
    """

    __slots__ = (
        "fits", "full_value", "itl", "length", "log_survival", "per_block", "reread_s", "step", "width",
        "worth",
    )  # fmt: skip

    def __init__(
        self, speed: Speed, length: float, cv: float, prompt: float, quantiles: tuple[float, ...], block: int,
        width: int, reread_s: float,
    ) -> None:  # fmt: skip
        # A sequence seen at random is on its way for L(1 + cv^2)/2 tokens: long ones are seen more often.
        context = prompt + length * (1 + cv * cv) / 2
        self.fits = int(max(1.0, min(speed.max_running, speed.kv_capacity_tokens / context)))
        self.itl = [speed.itl_s(n, n * context) for n in range(self.fits + 2)]
        self.length = length
        self.width = width
        self.per_block = block // width
        self.reread_s = reread_s
        self.worth = length * self.itl[self.fits] / self.fits * width
        self.full_value = float(width)  # of a replica with a full batch
        self.step, self.log_survival = _log_survival(quantiles)

    def value(self, blocks: int, outstanding: float) -> float:
        """Reference device-seconds a second of `blocks` with so many sequences outstanding."""
        if blocks <= 0 or outstanding <= 0:
            return 0.0
        replicas = blocks * self.per_block
        each = outstanding / replicas
        if each >= self.fits:
            return replicas * self.full_value
        if each < 1.0:
            return outstanding / (self.length * self.itl[1]) * self.worth
        low = int(each)
        itl = self.itl[low] + (self.itl[low + 1] - self.itl[low]) * (each - low)
        return outstanding / (self.length * itl) * self.worth

    def running(self, blocks: int, outstanding: float) -> float:
        """Sequences that run on `blocks`."""
        return min(outstanding, float(self.fits * blocks * self.per_block))

    def position(self, share: float) -> float:
        """The length that this share of sequences begun together has outlived."""
        wanted = math.log(max(share, LEAST_SURVIVAL))
        low, high = 0, CELLS
        while low < high:
            middle = (low + high) // 2
            if self.log_survival[middle] <= wanted:
                high = middle
            else:
                low = middle + 1
        return low * self.step

    def outliving(self, position: float) -> float:
        """The logarithm of the share that outlives `position`."""
        at = position / self.step
        low = int(at)
        if low >= CELLS:
            return self.log_survival[CELLS]
        return self.log_survival[low] + (self.log_survival[low + 1] - self.log_survival[low]) * (at - low)


@lru_cache(maxsize=64)
def _log_survival(quantiles: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """ln of the share that outlives i * step, for i to `CELLS`; beyond the longest length nobody is left."""
    step = (quantiles[-1] + 1) / CELLS
    found, at = [], 0
    for cell in range(CELLS):
        x = cell * step
        while at < len(quantiles) - 2 and quantiles[at + 1] <= x:
            at += 1
        below, above = quantiles[at], quantiles[at + 1]
        share = 0.0 if x <= below else min(1.0, (x - below) / (above - below)) if above > below else 1.0
        ended = 0.0 if x <= quantiles[0] else LEVELS[at] + share * (LEVELS[at + 1] - LEVELS[at])
        found.append(math.log(max(1.0 - ended, LEAST_SURVIVAL)))
    return step, (*found, -60.0, -60.0)


@lru_cache(maxsize=32)
def _role_model(
    speed: Speed, length: float, cv: float, prompt: float, quantiles: tuple[float, ...], block: int,
    width: int, reread_s: float,
) -> RoleModel:  # fmt: skip
    return RoleModel(speed, length, cv, prompt, quantiles, block, width, reread_s)


class Cluster:
    """The roles and the sizes of one view. Work is reference device-seconds, devices come in blocks."""

    __slots__ = (
        "batch", "block", "blocks", "calls", "devices", "fixed_s", "least_unit", "reward", "rollout",
        "shift_s", "step_s", "train_device_s", "training_share",
    )  # fmt: skip

    def __init__(self, view: View) -> None:
        estimates, layout, recipe = view.estimates, view.layout, view.recipe
        self.rollout, self.reward = (
            _role_model(
                estimates.speed[role], estimates.length_mean[role], estimates.length_cv[role],
                estimates.prompt_mean[role], tuple(estimates.length_quantiles[role]), layout.block,
                layout.width[role], estimates.reprefill_s[role],
            )
            for role in (Role.ROLLOUT, Role.REWARD)
        )  # fmt: skip
        self.block = layout.block
        self.blocks = len(layout.devices) // layout.block
        self.devices = self.blocks * layout.block
        self.least_unit = -(-layout.train_min // layout.block)
        self.batch = float(recipe.prompts * recipe.samples)
        self.calls = recipe.judge_calls
        self.train_device_s = estimates.train_device_s
        self.fixed_s = estimates.train_fixed_s
        self.shift_s = estimates.shift_s
        work = self.batch * (self.rollout.worth + self.calls * self.reward.worth) + self.train_device_s
        self.step_s = work / self.devices  # a step's whole work at reference speed on all devices
        self.training_share = self.train_device_s / work


class Outstanding:
    """What there is to do, by coming batch: sequences of each role, and the tokens that they have.

    `training_s` is what is left of the step under way, in device-seconds; None where none is.
    """

    __slots__ = ("judged_tokens", "judging", "rolled_tokens", "rolling", "to_admit", "training_s")

    def __init__(self, view: View, cluster: Cluster) -> None:
        batch, calls = cluster.batch, cluster.calls
        self.rolling = [float(coming.rolling) for coming in view.coming]
        self.judging = [float(coming.judging * calls) for coming in view.coming]
        itl = {role: _itl_now(view, role, model) for role, model in cluster_roles(cluster).items()}
        self.rolled_tokens = [
            _tokens(
                view.now_ns,
                coming.rolling_since_ns,
                itl[Role.ROLLOUT],
                cluster.rollout,
                coming.rolling / batch,
            )
            for coming in view.coming
        ]
        self.judged_tokens = [
            _tokens(view.now_ns, coming.judging_since_ns, itl[Role.REWARD], cluster.reward, 1.0)
            for coming in view.coming
        ]
        recipe, training = view.recipe, view.training
        admitted = min(recipe.steps, training.version + recipe.staleness + 1)
        self.to_admit = recipe.steps - admitted
        self.training_s: float | None = None
        if training.started_ns is not None:
            unit = sum(len(replica.placement.devices) for replica in view.of(Role.TRAIN))
            whole = cluster.train_device_s + cluster.fixed_s * unit
            done = (view.now_ns - training.started_ns) / NS_PER_S * unit
            self.training_s = max(0.03 * whole, whole - done)

    @property
    def rollouts(self) -> float:
        return sum(self.rolling)

    @property
    def judgements(self) -> float:
        return sum(self.judging)


def cluster_roles(cluster: Cluster) -> Mapping[Role, RoleModel]:
    return {Role.ROLLOUT: cluster.rollout, Role.REWARD: cluster.reward}


def _itl_now(view: View, role: Role, model: RoleModel) -> float:
    """Seconds a token at the load of this moment."""
    replicas = sum(1 for replica in view.replicas if replica.role is role and replica.running)
    each = min(model.fits, max(1, view.running[role] // replicas)) if replicas else 1
    return model.itl[each]


def _tokens(now_ns: int, since_ns: int | None, itl_s: float, model: RoleModel, share: float) -> float:
    """How many tokens the sequences of a batch have: as many as those that outlived the others must have, or
    as fit into the time since they began."""
    if share <= 0.0 or since_ns is None:
        return 0.0
    longest = 0.98 * model.step * CELLS
    aged = (now_ns - since_ns) / NS_PER_S / itl_s
    outlived = model.position(share) if share < 0.9 else 0.0
    return min(longest, outlived or aged)

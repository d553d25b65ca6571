"""When the next publishes come if the cluster is split so now, and a base rule decides from then on. Pure.

Outstanding work flows through the roles, batch by batch and the oldest first. Sequences of a batch are a
cohort: those that have x tokens and go on for dx more end in the share 1 - S(x + dx) / S(x), where S is the
share that outlives a length. So a batch's tail is as slow as the lengths say it is. Moving blocks takes a
shift, and whoever was on them is read in again: a debt of time that a role pays before it goes on.

The base rule is a part of the forecast, because a split lasts only until the next one is chosen: what is
compared is "this split now, and sensible ones after it".
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple, Protocol

from systems.policies.layouts import Split
from systems.policies.planners.model import Cluster, Outstanding, RoleModel

REVIEW_S = 30.0  # the base rule is asked again after so long without an event
BULK_STEP, TAIL_STEP = 0.3, 0.6  # a slice of the forecast, in mean lengths, with many and with few a replica
FEW = 8  # sequences a replica, from which on weights are most of what a step reads
LEAST_SLICE_S = 0.05
MOST_SLICES = 500
NOBODY = 0.5  # sequences below which a batch has none


class Base(Protocol):
    """The rule inside of a forecast."""

    def serve(self, cluster: Cluster, rollouts: float, judgements: float, blocks: int) -> tuple[int, int]: ...

    def unit(self, cluster: Cluster, rollouts: float, judgements: float, now: int) -> int: ...

    def pays(
        self, cluster: Cluster, rollouts: float, judgements: float, now: Split, other: Split
    ) -> bool: ...


class Forecast(NamedTuple):
    """After how long the wanted publishes have come, and the useful device-seconds done by then."""

    time_s: float
    value: float
    publishes: int


class _Flow:
    """A serving role under way: its cohorts by batch, its blocks, and the time that it owes."""

    __slots__ = ("amounts", "blocks", "debt_s", "itl_s", "model", "running", "tokens")

    def __init__(self, model: RoleModel, amounts: list[float], tokens: list[float], blocks: int) -> None:
        self.model = model
        self.amounts = amounts[:]
        self.tokens = tokens[:]
        self.blocks = blocks
        self.debt_s = 0.0
        self.running = self.itl_s = 0.0

    @property
    def total(self) -> float:
        return sum(self.amounts)

    def lend(self, blocks: int) -> None:
        """Some of its blocks go: what ran there is read in again on those that stay."""
        model, total = self.model, self.total
        if blocks < self.blocks and total:
            moved = model.running(self.blocks, total) * (self.blocks - blocks) / self.blocks
            self.debt_s += moved * model.reread_s / max(1, blocks * model.per_block)
        self.blocks = min(self.blocks, blocks)

    def interrupt(self) -> None:
        """A version is published: everything that runs is read in again."""
        if self.blocks:
            each = min(self.total / (self.blocks * self.model.per_block), self.model.fits)
            self.debt_s += each * self.model.reread_s

    def slice_s(self) -> float:
        """For how long its rate holds about; infinite if it does nothing."""
        model, total = self.model, self.total
        self.running = 0.0
        if total <= 0 or self.blocks <= 0:
            return float("inf")
        self.running = model.running(self.blocks, total)
        each = self.running / (self.blocks * model.per_block)
        self.itl_s = model.itl[max(1, int(each))]
        return (BULK_STEP if each > FEW else TAIL_STEP) * model.length * self.itl_s + self.debt_s

    def advance(self, seconds: float) -> list[float]:
        """Sequences of each batch that end meanwhile."""
        ended = [0.0] * len(self.amounts)
        if not self.running:
            return ended
        seconds, self.debt_s = seconds - self.debt_s, max(0.0, self.debt_s - seconds)
        if seconds <= 0:
            return ended
        on = seconds / self.itl_s
        left, survivors = self.running, self.model.outliving
        for index, amount in enumerate(self.amounts):
            if not amount:
                continue
            run = min(amount, left)
            left -= run
            if run <= 0:
                break
            at = self.tokens[index]
            done = run * (1.0 - exp(survivors(at + on) - survivors(at)))
            staying = amount - done
            if staying < NOBODY:
                done, staying = amount, 0.0
            ended[index] = done
            self.amounts[index] = staying
            if staying:  # those that go on are older, and new ones take the places of those that ended
                self.tokens[index] = (at + on) * (run - done) / min(staying, run)
        return ended

    def join(self, index: int, count: float) -> None:
        """New sequences of a batch, with no token yet."""
        there = self.amounts[index]
        if there + count > 0:
            self.tokens[index] *= there / (there + count)
        self.amounts[index] = there + count

    def admit(self, count: float) -> None:
        self.amounts.append(count)
        self.tokens.append(0.0)

    def drop_first(self) -> None:
        del self.amounts[0], self.tokens[0]


def forecast(
    cluster: Cluster, outstanding: Outstanding, now: Split, first: Split, publishes: int, base: Base,
    limit_s: float = float("inf"),
) -> Forecast:  # fmt: skip
    """The cluster, split as `now`, goes over to `first`; `base` decides from the first event on."""
    rollout = _Flow(cluster.rollout, outstanding.rolling, outstanding.rolled_tokens, now.rollout)
    reward = _Flow(cluster.reward, outstanding.judging, outstanding.judged_tokens, now.reward)
    unit, training_s, to_admit = now.train, outstanding.training_s, outstanding.to_admit
    time_s = value = 0.0
    published = 0
    coming: Split | None = None
    ready_s = 0.0

    def move(split: Split) -> None:
        nonlocal coming, ready_s, unit
        rollout.lend(split.rollout)
        reward.lend(split.reward)
        unit = unit if split.train == unit else 0
        coming, ready_s = split, time_s + cluster.shift_s

    if first != now:
        move(first)
    review_s = cluster.shift_s
    event = False
    for _ in range(MOST_SLICES):
        if coming is not None and time_s >= ready_s - 1e-9:
            rollout.blocks, reward.blocks, unit = coming
            coming = None
        trainable = bool(rollout.amounts) and rollout.amounts[0] + reward.amounts[0] < NOBODY
        if training_s is None and trainable and unit:
            rollout.drop_first()
            reward.drop_first()
            training_s = cluster.train_device_s + cluster.fixed_s * unit * cluster.block
            trainable = bool(rollout.amounts) and rollout.amounts[0] + reward.amounts[0] < NOBODY
        nothing_left = training_s is None and not rollout.amounts and to_admit <= 0
        if published >= publishes or time_s > limit_s or nothing_left:
            break
        if coming is None and (event or time_s >= review_s):
            split = Split(rollout.blocks, reward.blocks, unit)
            rollouts, judgements = rollout.total, reward.total
            if training_s is not None:
                wanted = unit
            else:
                wanted = base.unit(cluster, rollouts, judgements, unit) if trainable else 0
            better = Split(*base.serve(cluster, rollouts, judgements, cluster.blocks - wanted), wanted)
            if better.train != unit or (
                better != split and base.pays(cluster, rollouts, judgements, split, better)
            ):
                move(better)
            review_s = time_s + REVIEW_S
            event = False
        seconds = min(
            rollout.slice_s(), reward.slice_s(), ready_s - time_s if coming is not None else review_s - time_s
        )
        if training_s is not None and unit:
            seconds = min(seconds, training_s / (unit * cluster.block))
        seconds = max(LEAST_SLICE_S, seconds)
        time_s += seconds
        had_rollouts, had_judgements = rollout.running > 0, reward.running > 0
        for index, done in enumerate(rollout.advance(seconds)):
            if done:
                value += done * cluster.rollout.worth
                if cluster.calls:
                    reward.join(index, done * cluster.calls)
        value += sum(reward.advance(seconds)) * cluster.reward.worth
        if training_s is not None and unit:
            training_s -= seconds * unit * cluster.block
            value += seconds * unit * cluster.block
            if training_s <= 1e-6:
                training_s = None
                published += 1
                event = True
                rollout.interrupt()
                if to_admit > 0:
                    to_admit -= 1
                    rollout.admit(cluster.batch)
                    reward.admit(0.0)
        if training_s is None and not trainable and rollout.amounts:
            event = event or rollout.amounts[0] + reward.amounts[0] < NOBODY
        event = (
            event
            or (had_rollouts and not any(rollout.amounts))
            or (had_judgements and not any(reward.amounts))
        )
    return Forecast(time_s, value, published)

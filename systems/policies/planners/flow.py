"""The default planner: blocks go where they are most useful now, moves are paid for like rented skis.

Serving        a block for each role with work, then block by block to the role that gains more value from
               it (`model.py`).
Training unit  parked while no batch is ready. When one is, serving keeps what it needs and the unit takes
               the rest; it is decided again between two steps, and fixed only while one runs.
Moves          cost a shift of the blocks and reading again what ran on them. Not having the best split
               costs the gap in value, every second: this *regret* adds up, and a move is made once regret
               and what the gap still promises exceed its price. Changing the unit is free, and so is
               giving devices to a role that has work and none.
Look-ahead     only for the unit: a few sizes are followed to the next publishes (`forecast.py`).

Why there is no regime to fall into: a price without memory is a trap, because a gap below it is never closed.
Regret grows for as long as there is a gap, so every move that helps is made after a bounded time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from systems.policies.layouts import Split
from systems.policies.planners.forecast import forecast
from systems.policies.planners.model import Cluster, Outstanding, RoleModel
from systems.types import NS_PER_S, View

KEPT_A_REPLICA = 96  # sequences a replica that serving keeps beside training: above it a replica is half as
# dear a sequence as at 32, and hardly dearer than a full one
CREDIT = 0.15  # of an RL step: for how long a gap in value is expected to last
PUBLISHES = 3  # how far the look-ahead for the unit goes: this step's, and two that its size delays or brings
EFFICIENCY = 0.8  # of all devices: what a device-second that was not used up by then is worth later
CLEARLY = 0.01  # of an RL step, by which another unit must come out ahead
SIZES = (1, 2, 4)  # blocks more or less that the look-ahead tries
SLACK = 1  # blocks by which a unit may differ from the one wanted
ROUNDING = 0.3  # of a block that a role may lack before it is given one more


class Gain(NamedTuple):
    """What a move would bring: value a second, its price in device-seconds."""

    gap: float
    price: float


@dataclass(frozen=True, slots=True)
class Regret:
    """Device-seconds lost since the last move by not having the best split; `gap` is what a second loses."""

    lost: float = 0.0
    gap: float = 0.0
    seen_ns: int = 0

    def at(self, now_ns: int) -> float:
        return self.lost + self.gap * (now_ns - self.seen_ns) / NS_PER_S


class Flow:
    """The planner's three rules, which are also the base rule inside of its forecasts."""

    name = "flow"
    knows_lengths = False
    tick_s = 15.0  # asks to be woken so often: regret grows between events too
    cooldown_shifts = 1.0

    def begin(self) -> Regret:
        return Regret()

    def choose(self, view: View, now: Split, memory: Regret) -> tuple[Split, str, Regret]:
        """The split to have, why, and what to remember."""
        cluster = Cluster(view)
        outstanding = Outstanding(view, cluster)
        rollouts, judgements = outstanding.rollouts, outstanding.judgements
        training = view.training
        if training.started_ns is not None:
            unit = now.train
        elif training.batch_ready:
            unit = self.unit(cluster, rollouts, judgements, now.train)
        else:
            unit = 0
        best = Split(*self.serve(cluster, rollouts, judgements, cluster.blocks - unit), unit)
        if training.batch_ready and training.started_ns is None:
            best = self._look_ahead(cluster, outstanding, now, best, view)
        if best.train != now.train or best == now:
            return best, f"unit {best.train}", Regret(0.0, 0.0, view.now_ns)
        regret = memory.at(view.now_ns)
        gap = _gain(cluster, rollouts, judgements, now, best).gap
        starved = (rollouts > 0 and not now.rollout) or (judgements > 0 and not now.reward)
        chosen, most = now, 0.0
        for split in (best, _half_way(now, best)):
            gain = _gain(cluster, rollouts, judgements, now, split)
            worth = gain.gap * CREDIT * cluster.step_s + regret - gain.price
            if split != now and ((gain.gap > 0 and worth > most) or (starved and chosen == now)):
                chosen, most = split, worth
        if chosen == now:
            return now, f"keep: {regret:.0f} lost so far", Regret(regret, max(0.0, gap), view.now_ns)
        return chosen, f"gain {most:.0f} device-s", Regret(0.0, 0.0, view.now_ns)

    # ------------------------------------------------------------------------- the base rule

    def serve(self, cluster: Cluster, rollouts: float, judgements: float, blocks: int) -> tuple[int, int]:
        """Blocks for rollout and reward: each next one where it is most useful."""
        if blocks <= 0:
            return 0, 0
        if rollouts <= 0 and judgements <= 0:
            return blocks - blocks // 2, blocks // 2
        if rollouts <= 0:
            return 0, blocks
        if judgements <= 0:
            return (blocks - 1, 1) if blocks > 1 and cluster.calls else (blocks, 0)
        rollout, reward = cluster.rollout, cluster.reward
        if blocks == 1:
            return (0, 1) if judgements * reward.worth >= rollouts * rollout.worth else (1, 0)
        # The gain of a block falls with their number, so the best split is where the two gains cross.
        low, high = 1, blocks - 1  # of rollout
        while low < high:
            middle = (low + high) // 2
            more = rollout.value(middle + 1, rollouts) - rollout.value(middle, rollouts)
            less = reward.value(blocks - middle, judgements) - reward.value(blocks - middle - 1, judgements)
            if more > less:
                low = middle + 1
            else:
                high = middle
        return low, blocks - low

    def unit(self, cluster: Cluster, rollouts: float, judgements: float, now: int) -> int:
        """Blocks to train on: all that serving does not need, at least training's share of all work."""
        most = cluster.blocks - (rollouts > 0) - (judgements > 0)
        least = max(cluster.least_unit, math.ceil(cluster.training_share * cluster.blocks - 0.2))
        needed = _needed(cluster.rollout, rollouts) + _needed(cluster.reward, judgements)
        wanted = max(cluster.least_unit, min(most, max(least, cluster.blocks - needed)))
        return now if now and abs(now - wanted) <= SLACK and now <= most else wanted

    def pays(self, cluster: Cluster, rollouts: float, judgements: float, now: Split, other: Split) -> bool:
        """Would a forecast's base rule make this move? It has no regret."""
        gain = _gain(cluster, rollouts, judgements, now, other)
        starved = (rollouts > 0 and not now.rollout) or (judgements > 0 and not now.reward)
        return starved or gain.gap * CREDIT * cluster.step_s > gain.price

    # ------------------------------------------------------------------------- the unit

    def _look_ahead(
        self, cluster: Cluster, outstanding: Outstanding, now: Split, best: Split, view: View
    ) -> Split:
        """The size of the training unit that is ahead after the next publishes."""
        rollouts, judgements = outstanding.rollouts, outstanding.judgements
        most = cluster.blocks - (rollouts > 0) - (judgements > 0)
        sizes = {best.train + sign * size for size in SIZES for sign in (-1, 1)} | {now.train, most}
        publishes = min(PUBLISHES, view.recipe.steps - view.training.version)

        def score(split: Split) -> float:
            found = forecast(cluster, outstanding, now, split, publishes, self)
            if found.publishes < publishes:
                return math.inf
            return found.time_s - found.value / (EFFICIENCY * cluster.devices)

        first = least = score(best)
        chosen = best
        for size in sorted(sizes):
            if cluster.least_unit <= size <= most and size != best.train and size > 0:
                split = Split(*self.serve(cluster, rollouts, judgements, cluster.blocks - size), size)
                scored = score(split)
                if scored < least:
                    chosen, least = split, scored
        return chosen if least < first - CLEARLY * cluster.step_s else best


def _needed(model: RoleModel, outstanding: float) -> int:
    """Blocks that serve so many sequences at a good batch size."""
    if outstanding <= 0:
        return 0
    return max(1, math.ceil(outstanding / (KEPT_A_REPLICA * model.per_block) - ROUNDING))


def _gain(cluster: Cluster, rollouts: float, judgements: float, now: Split, other: Split) -> Gain:
    rollout, reward = cluster.rollout, cluster.reward
    gap = rollout.value(other.rollout, rollouts) - rollout.value(now.rollout, rollouts)
    gap += reward.value(other.reward, judgements) - reward.value(now.reward, judgements)
    moved = max(now.rollout - other.rollout, now.reward - other.reward, 0)
    price = moved * cluster.block * cluster.shift_s
    for model, before, after, outstanding in (
        (rollout, now.rollout, other.rollout, rollouts), (reward, now.reward, other.reward, judgements),
    ):  # fmt: skip
        if after < before:
            migrated = model.running(before, outstanding) * (before - after) / before
            price += migrated * model.width * model.reread_s
    return Gain(gap, price)


def _half_way(now: Split, best: Split) -> Split:
    moved = best.rollout - now.rollout
    half = int(moved / 2)
    return Split(now.rollout + half, now.reward - half, now.train)

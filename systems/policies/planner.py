"""What a plan would bring: candidates, a fluid forecast of the next publishes, the price of shifting.

The objective of a split is T, the predicted time until the next two publishes. It is found by letting
the outstanding work flow through the roles:

    d(rollouts)/dt   = -n / (L * ITL(n per replica))     lengths are taken as memoryless, so n sequences
    d(judgements)/dt = the same for the judge            always have n * L tokens to go, and the tail of
    training starts with a full batch                    a step shows as an exponential decay

A block that changes its role works for nobody during `shift_s`. A split is followed for as long as it
makes progress; when it makes none (a batch is ready and nobody trains, or only roles without devices
have work) the best balanced split takes over, and pays for its own shift. So every split has a finite
T, and "all devices roll out now, judges come later" is compared fairly with a balanced one. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from systems.policies.layouts import count
from systems.types import LeaseState, Role, View

HORIZON_PUBLISHES = 2
SLICE, TAIL_SLICE = 0.8, 1.6  # e-foldings of a role's work in a slice of the forecast: within a slice
# decay is exact for a fixed rate, and in the tail, where weights are read for a few sequences, rates stay
TAIL = 16  # sequences a replica below which that is so
BASE_MOVES = 4  # the balanced split follows the workload by a few blocks an RL step
MAX_SLICES = 200  # a forecast that is not done by then is as good as infinite
MIN_GAIN = 0.05  # of T: below it a forecast's own error decides (source: artifact-template)
SIGMAS = 2.0  # a gain must exceed that even if lengths are off by two standard deviations

Split = Mapping[Role, int]  # blocks a role


class _Rate:
    """How fast one role completes sequences, given replicas and how many are outstanding."""

    __slots__ = ("_fits", "_itl", "_length", "_per_block")

    def __init__(self, view: View, role: Role) -> None:
        estimates = view.estimates
        speed, length = estimates.speed[role], estimates.length_mean[role]
        context = estimates.prompt_mean[role] + length / 2
        self._itl = (speed.a * context, speed.b, speed.c, speed.d)
        self._length = length
        self._fits = max(1.0, min(speed.max_running, speed.kv_capacity_tokens / context))
        self._per_block = view.layout.block / view.layout.width[role]

    def each(self, blocks: int, outstanding: float) -> tuple[float, float, float]:
        """Sequences that run, completions per second of each, and for how long that holds about."""
        replicas = blocks * self._per_block
        if outstanding <= 0 or replicas < 1:
            return 0.0, 0.0, math.inf
        batch = outstanding / replicas
        if batch > self._fits:
            batch = self._fits
            outstanding = batch * replicas
        elif batch < 1.0:
            batch = 1.0
        a, b, c, d = self._itl
        compute = c * batch
        took = (a * batch + (compute if compute > b else b) + d) * self._length
        return outstanding, 1.0 / took, took * (SLICE if batch > TAIL else TAIL_SLICE)


class _Flow:
    """The state of a forecast: sequences (as fractions) by the batch that they will be in.

    All rollouts of a replica run side by side; judgements are served in the order of their batches.
    """

    def __init__(self, view: View) -> None:
        recipe, training = view.recipe, view.training
        self.calls = recipe.judge_calls
        self.batch = float(recipe.prompts * recipe.samples)
        self.rolling = [float(batch.rolling) for batch in view.coming]
        self.judging = [float(batch.judging * self.calls) for batch in view.coming]
        admitted = min(recipe.steps, training.version + recipe.staleness + 1)
        self.to_admit = recipe.steps - admitted
        self.rollout, self.reward = _Rate(view, Role.ROLLOUT), _Rate(view, Role.REWARD)
        self.train_device_s = view.estimates.train_device_s
        self.block = view.layout.block
        self.training_s: float | None = None  # device-seconds that the present step still takes
        self.publishes = 0
        self.time_s = 0.0
        if training.started_ns is not None:
            unit = sum(len(replica.placement.devices) for replica in view.of(Role.TRAIN))
            done = (view.now_ns - training.started_ns) / 1e9 * unit
            self.training_s = max(0.05 * self.train_device_s, self.train_device_s - done)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those that have work at all: nobody judges where a rule gives the reward."""
        return tuple(Role) if self.calls else (Role.ROLLOUT, Role.TRAIN)

    @property
    def trainable(self) -> bool:
        if self.training_s is not None:
            return True
        return bool(self.rolling) and self.rolling[0] + self.judging[0] < 0.5

    def stuck(self, split: Split) -> bool:
        """Does this split leave all that could be done to roles without devices?"""
        if self.trainable and not split[Role.TRAIN]:
            return True
        rolls = split[Role.ROLLOUT] and any(self.rolling)
        judges = split[Role.REWARD] and any(self.judging)
        return not ((self.trainable and split[Role.TRAIN]) or rolls or judges)

    def phase(self, blocks: int) -> Split:
        """All blocks to one role that has work: what is left where there are fewer blocks than roles."""
        role = Role.TRAIN if self.trainable else Role.ROLLOUT if any(self.rolling) else Role.REWARD
        return {**dict.fromkeys(Role, 0), role: blocks}

    def advance(self, split: Split, limit_s: float) -> None:
        """One slice: as long as rates hold about, at most `limit_s`."""
        train = split[Role.TRAIN]
        if self.training_s is None and train and self.trainable:
            del self.rolling[0], self.judging[0]
            self.training_s = self.train_device_s
        rolling = sum(self.rolling)
        rolled, roll_rate, roll_s = self.rollout.each(split[Role.ROLLOUT], rolling)
        judged, judge_rate, judge_s = self.reward.each(split[Role.REWARD], sum(self.judging))
        slice_s = min(limit_s, roll_s, judge_s)
        if self.training_s is not None and train:
            slice_s = min(slice_s, self.training_s / (train * self.block))
        self.time_s += slice_s
        if slice_s == math.inf:
            return
        if rolled:
            kept = 1.0 - rolled / rolling * (1.0 - math.exp(-roll_rate * slice_s))
            for index, amount in enumerate(self.rolling):
                staying = amount * kept if amount * kept >= 0.5 else 0.0
                self.judging[index] += (amount - staying) * self.calls
                self.rolling[index] = staying
        if judged:
            done = 1.0 - math.exp(-judge_rate * slice_s)
            for index, amount in enumerate(self.judging):
                running = min(amount, judged)
                judged -= running
                left = amount - running * done
                self.judging[index] = left if left >= 0.5 else 0.0
        if self.training_s is not None and train:
            self.training_s -= slice_s * train * self.block
            if self.training_s <= 1e-9:
                self.training_s = None
                self.publishes += 1
                if self.to_admit > 0:
                    self.to_admit -= 1
                    self.rolling.append(self.batch)
                    self.judging.append(0.0)


def forecast(view: View, now: Split, split: Split, base: Split, limit_s: float = math.inf) -> float:
    """T in seconds if the cluster, now split as `now`, is split as `split` and later as `base`.

    A forecast that exceeds `limit_s` is not pursued: it is infinite.
    """
    wanted = min(HORIZON_PUBLISHES, max(1, view.recipe.steps - view.training.version))
    flow = _Flow(view)
    shift_s = view.estimates.shift_s
    before, after = now, split
    ready_s = shift_s if any(now[role] != split[role] for role in Role) else 0.0
    on_base, staffed = split == base, all(base[role] for role in flow.roles)
    for _ in range(MAX_SLICES):
        if flow.publishes >= wanted or flow.time_s > limit_s:
            break
        if flow.time_s < ready_s:
            kept = {role: min(before[role], after[role]) for role in Role}
            flow.advance(kept, ready_s - flow.time_s)
        elif not on_base and flow.stuck(after):
            before, after = after, base if staffed else flow.phase(sum(now.values()))
            on_base = staffed
            ready_s = flow.time_s + shift_s
        else:
            flow.advance(after, math.inf)
    return flow.time_s if flow.publishes >= wanted else math.inf


def stuck(view: View, now: Split) -> bool:
    """Does the present split leave all that could be done to roles without devices?"""
    return _Flow(view).stuck(now)


def confidence(view: View) -> float:
    """The share of a predicted gain that is left if lengths are two standard deviations off.

    Forecasts of two splits share their lengths, so what is uncertain is their difference, in proportion.
    """
    batch = view.recipe.prompts * view.recipe.samples
    spread = max(view.estimates.length_cv.values()) / math.sqrt(batch)
    return max(0.0, 1.0 - SIGMAS * spread)


def candidates(view: View, start: Split, largest: int | None = None) -> list[Split]:
    """Splits worth a forecast: `start`, and those one transfer between two roles away from it.

    Transfers come in powers of two (up to `largest`), so their number grows with the logarithm of the
    cluster.
    """
    smallest = -(-view.layout.train_min // view.layout.block)
    found: dict[tuple[int, ...], Split] = {}

    def add(split: dict[Role, int]) -> None:
        train = split[Role.TRAIN]
        if train == 0 or train >= smallest:
            found.setdefault(tuple(split[role] for role in Role), split)

    add(dict(start))
    for donor, receiver in permutations(Role, 2):
        for amount in _amounts(start[donor]):
            if largest is None or amount <= largest:
                add({**start, donor: start[donor] - amount, receiver: start[receiver] + amount})
    return list(found.values())


def _amounts(most: int) -> list[int]:
    amounts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*amounts, most] if most else []


def balance(view: View, now: Split, base: Split) -> Split:
    """`base` after at most `BASE_MOVES` transfers of one block, each the best, as long as T falls."""
    best_s = forecast(view, now, base, base)
    for _ in range(BASE_MOVES):
        found = base
        for split in candidates(view, base, largest=1):
            if all(split.values()):
                time_s = forecast(view, now, split, split, best_s)
                if time_s < best_s:
                    found, best_s = split, time_s
        if found == base:
            break
        base = found
    return base


@dataclass(frozen=True, slots=True)
class Choice:
    """The split to have, and why."""

    split: Split
    why: str


def choose(view: View, now: Split, base: Split) -> Choice:
    """The best split if its gain exceeds its price, else the present one.

    A split that makes no progress from the start is not a choice; if the present one makes none, the
    best of the others is taken whatever it costs. While a step is being trained on, or is about to be,
    the training unit stays as it is: it cannot be resized half-way.
    """
    flow = _Flow(view)
    training = view.training
    busy = training.started_ns is not None or (training.batch_ready and now[Role.TRAIN] > 0)
    moving = [
        split
        for split in [*candidates(view, now), base]
        if not flow.stuck(split) and not (busy and split[Role.TRAIN] != now[Role.TRAIN])
    ]
    if not moving:
        return Choice(now, "keep: nothing to do")
    idle = flow.stuck(now)
    present_s = math.inf if idle else forecast(view, now, now, base)
    best, best_s = now, present_s
    for split in moving:
        time_s = forecast(view, now, split, base, best_s)
        if time_s < best_s:
            best, best_s = split, time_s
    if best == now:
        return Choice(now, "keep: no split is faster")
    if idle:
        return Choice(best, f"stuck: T {best_s:.1f} s")
    gain_s, price_s = confidence(view) * (present_s - best_s), MIN_GAIN * present_s
    if gain_s > price_s:
        return Choice(best, f"shift: T {present_s:.1f} -> {best_s:.1f} s")
    return Choice(now, f"keep: sure gain {gain_s:.1f} s is below {price_s:.1f} s")


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
        )[: max(0, have[role] - split[role])]
    ]
    for role in Role:
        for _ in range(max(0, split[role] - have[role])):
            changed[spare.pop(0)] = role
    return tuple(changed)


def _block_load(view: View) -> dict[int, int]:
    first = view.layout.devices[0].id
    load: dict[int, int] = {}
    for replica in view.replicas:
        if replica.state is LeaseState.ACTIVE:
            for device in replica.placement.devices:
                index = (device - first) // view.layout.block
                load[index] = load.get(index, 0) + replica.running
    return load

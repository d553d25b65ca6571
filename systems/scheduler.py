"""Which waiting sequence goes to which replica. Pure; the same for every system and both roles.

A sequence goes where it adds most tokens per second under the throughput model (`Speed`): with n
sequences on a replica, placing one more changes n / ITL(n) to (n + 1) / ITL(n + 1). A replica is full
when its batch is, with a few queued behind it, or when the context that its sequences are expected to
grow to would not fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from systems.types import Speed

MAX_MOVES = 64  # a rebalance that needs more pairs than this is left to the next one


class Waiting(NamedTuple):
    """A sequence in the queue: the oldest policy version that may write it, and its context so far."""

    id: int
    min_version: int
    context_tokens: int


class Load(NamedTuple):
    """What a replica has now. `epoch` is its lease's."""

    epoch: int
    version: int
    running: int
    kv_tokens: float

    def plus(self, count: int, context_tokens: float) -> Load:
        kv_tokens = max(0.0, self.kv_tokens + count * context_tokens)
        return Load(self.epoch, self.version, self.running + count, kv_tokens)


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate `count` sequences between replicas of one role."""

    source: int
    target: int
    count: int


def marginal_gain(load: Load, speed: Speed, context_tokens: float) -> float:
    """Tokens per second gained by one more sequence of this context; none behind a full batch."""
    if load.running >= speed.max_running:
        return 0.0
    n, kv = load.running, load.kv_tokens
    more = (n + 1) / speed.itl_s(n + 1, kv + context_tokens)
    return more - n / speed.itl_s(n, kv) if n else more


def has_room(load: Load, speed: Speed, context_tokens: float, growth_tokens: float) -> bool:
    """Does one more sequence fit, if all of them grow by `growth_tokens`? An empty replica takes any."""
    if load.running == 0:
        return True
    expected = load.kv_tokens + context_tokens + (load.running + 1) * growth_tokens
    return load.running < speed.max_running + speed.ahead and expected <= speed.kv_capacity_tokens


def assign(
    waiting: Iterable[Waiting], loads: Sequence[Load], speed: Speed, growth_tokens: float
) -> list[tuple[int, int]]:
    """(sequence id, lease epoch) in queue order, until one does not fit. Ties go to the
    emptier replica, then to the older lease.

    `waiting` is read lazily: a long queue before full replicas costs nothing.
    """
    placed: list[tuple[int, int]] = []
    current = {load.epoch: load for load in loads}
    heap: list[tuple[float, int, int]] = []
    min_version: int | None = None
    for item in waiting:
        if item.min_version != min_version:
            min_version, context = item.min_version, item.context_tokens
            heap = [
                (-marginal_gain(load, speed, context), load.running, load.epoch)
                for load in current.values()
                if load.version >= min_version
            ]
            heapq.heapify(heap)
        while heap and not has_room(current[heap[0][2]], speed, item.context_tokens, growth_tokens):
            heapq.heappop(heap)
        if not heap:
            break
        epoch = heap[0][2]
        placed.append((item.id, epoch))
        current[epoch] = load = current[epoch].plus(1, item.context_tokens)
        heapq.heapreplace(heap, (-marginal_gain(load, speed, item.context_tokens), load.running, epoch))
    return placed


def rebalance(loads: Sequence[Load], speed: Speed, remaining_tokens: float, reprefill_s: float) -> list[Move]:
    """Moves from the fullest to the emptiest replica that pay for themselves.

    Moving k sequences changes the role's tokens per second by d for about the time that a sequence
    still runs; it costs k sequences their tokens during one re-prefill.
    """
    moves: list[Move] = []
    current = sorted(loads, key=lambda load: load.epoch)
    for _ in range(min(MAX_MOVES, len(current))):
        full = max(current, key=lambda load: (load.running, -load.epoch))
        empty = min(current, key=lambda load: (load.running, load.epoch))
        count = (full.running - empty.running) // 2
        if count < 1 or empty.version < full.version:
            break
        context = full.kv_tokens / full.running
        if empty.kv_tokens + count * (context + remaining_tokens) > speed.kv_capacity_tokens:
            break
        after = (full.plus(-count, context), empty.plus(count, context))
        gain = sum(speed.tokens_per_s(load.running, load.kv_tokens) for load in after)
        gain -= sum(speed.tokens_per_s(load.running, load.kv_tokens) for load in (full, empty))
        itl = speed.itl_s(after[1].running, after[1].kv_tokens)
        if gain * remaining_tokens * itl <= count * reprefill_s / itl:
            break
        moves.append(Move(full.epoch, empty.epoch, count))
        current = [load for load in current if load not in (full, empty)] + list(after)
    return moves

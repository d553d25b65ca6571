"""Which waiting sequence goes to which replica. Pure; the same for every system and both roles.

A sequence goes where it will be served best: to the replica whose inter-token latency is lowest once the
sequence is there, under the throughput model (`Speed`). Latency grows with the number of sequences and with
the context that they hold, so long contexts repel and equal replicas fill evenly. Behind a full batch a
sequence waits, so replicas with a place come before those without. A replica takes nothing more when its
batch is full with a few queued behind it, or when the context that its sequences are expected to grow to
would not fit.

(An earlier rule sent a sequence where it adds most tokens a second. That gain is largest where contexts are
long already, because there one more sequence slows the others least in proportion: such a replica attracts
ever more, and ends long after all others. See docs/decisions/0017-dispatch.md.)
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


def served_after(load: Load, speed: Speed) -> tuple[int, float, int, int]:
    """How a replica serves once it has one sequence more: less is better.

    First its place behind a full batch, then the inter-token latency in seconds; ties go to the emptier
    replica, then to the older lease. The newcomer's own context is left out: it costs the same everywhere.
    """
    n = load.running + 1
    return max(0, n - speed.max_running), speed.itl_s(n, load.kv_tokens), load.running, load.epoch


def has_room(load: Load, speed: Speed, context_tokens: float, growth_tokens: float) -> bool:
    """Does one more sequence fit, if all of them grow by `growth_tokens`? An empty replica takes any."""
    if load.running == 0:
        return True
    expected = load.kv_tokens + context_tokens + (load.running + 1) * growth_tokens
    return load.running < speed.max_running + speed.ahead and expected <= speed.kv_capacity_tokens


def assign(
    waiting: Iterable[Waiting], loads: Sequence[Load], speed: Speed, growth_tokens: float
) -> list[tuple[int, int]]:
    """(sequence id, lease epoch) in queue order, until one does not fit.

    `waiting` is read lazily: a long queue before full replicas costs nothing.
    """
    placed: list[tuple[int, int]] = []
    current = {load.epoch: load for load in loads}
    heap: list[tuple[int, float, int, int]] = []
    min_version: int | None = None
    for item in waiting:
        if item.min_version != min_version:
            min_version = item.min_version
            heap = [served_after(load, speed) for load in current.values() if load.version >= min_version]
            heapq.heapify(heap)
        while heap and not has_room(current[heap[0][-1]], speed, item.context_tokens, growth_tokens):
            heapq.heappop(heap)
        if not heap:
            break
        epoch = heap[0][-1]
        placed.append((item.id, epoch))
        current[epoch] = load = current[epoch].plus(1, item.context_tokens)
        heapq.heapreplace(heap, served_after(load, speed))
    return placed


def take_turns(
    waiting: Iterable[Waiting], loads: Sequence[Load], speed: Speed, growth_tokens: float, last: int
) -> list[tuple[int, int]]:
    """As `assign`, but each sequence goes to the next replica after the one that got the last (an epoch) that
    has room for it, in order of their leases."""
    placed: list[tuple[int, int]] = []
    current = {load.epoch: load for load in sorted(loads, key=lambda load: load.epoch)}
    for item in waiting:
        after = [epoch for epoch in current if epoch > last]
        turn = [*after, *(epoch for epoch in current if epoch <= last)]
        able = (
            epoch
            for epoch in turn
            if current[epoch].version >= item.min_version
            and has_room(current[epoch], speed, item.context_tokens, growth_tokens)
        )
        last = next(able, -1)
        if last < 0:
            break
        placed.append((item.id, last))
        current[last] = current[last].plus(1, item.context_tokens)
    return placed


def rebalance(loads: Sequence[Load], speed: Speed, remaining_tokens: float, reprefill_s: float) -> list[Move]:
    """Moves from the slowest to the fastest replica that pay for themselves.

    Moving k sequences changes the role's tokens per second by d for about the time that a sequence
    still runs; it costs k sequences their tokens during one re-prefill. At most as many move as leave the
    source no faster than the target.
    """
    moves: list[Move] = []
    current = sorted(loads, key=lambda load: load.epoch)
    for _ in range(min(MAX_MOVES, len(current))):
        slow = max(current, key=lambda load: served_after(load, speed))
        fast = min(current, key=lambda load: served_after(load, speed))
        count = _even(slow, fast, speed)
        if count < 1 or fast.version < slow.version:
            break
        context = slow.kv_tokens / slow.running
        if fast.kv_tokens + count * (context + remaining_tokens) > speed.kv_capacity_tokens:
            break
        after = (slow.plus(-count, context), fast.plus(count, context))
        gain = sum(speed.tokens_per_s(load.running, load.kv_tokens) for load in after)
        gain -= sum(speed.tokens_per_s(load.running, load.kv_tokens) for load in (slow, fast))
        itl = speed.itl_s(after[1].running, after[1].kv_tokens)
        if gain * remaining_tokens * itl <= count * reprefill_s / itl:
            break
        moves.append(Move(slow.epoch, fast.epoch, count))
        current = [load for load in current if load not in (slow, fast)] + list(after)
    return moves


def _even(slow: Load, fast: Load, speed: Speed) -> int:
    """The most sequences of mean context that can move before the order of the two is reversed."""
    if slow.running <= fast.running:
        return 0
    context = slow.kv_tokens / slow.running
    low, high = 0, (slow.running - fast.running) // 2
    while low < high:
        count = (low + high + 1) // 2
        left, got = slow.plus(-count, context), fast.plus(count, context)
        if served_after(left, speed)[:3] >= served_after(got.plus(-1, context), speed)[:3]:
            low = count
        else:
            high = count - 1
    return low

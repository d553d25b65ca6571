"""A simulated serving replica: continuous batching, advanced from one batch change to the next.

Between batch changes every running sequence gains one token a step, and step i costs
alpha + beta * (KV + n*i). The time of k steps is therefore closed:

    k*alpha + beta * (KV*k + n*k*(k-1)/2)

and a whole stretch costs one timer, never one a token. A change (arrival, end, abort, full cache)
happens at a step boundary; an abort loses the step under way.

Invariants
* `_steps` counts decode steps since the replica was made; a sequence that joined at step j with r
  tokens to go ends at step j + r, so advancing n sequences is O(1).
* Newcomers are read in by one prefill, during which nobody decodes.
* When the cache is full the newest sequence is preempted: it waits here and is read in again.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from systems.backends.base import Finished, TokenChunk, Work, WorkerLoad, WorkerLost
from systems.backends.sim.durations import ServingDurations
from systems.backends.sim.lengths import LengthSource
from systems.backends.sim.lifeline import Lifeline
from systems.clock import now_ns, to_ns
from systems.mailbox import Mailbox

STREAM_TOKENS = 16  # a live worker streams about this often; a simulated loss keeps whole chunks only


@dataclass(slots=True)
class _Run:
    """A sequence in the batch: it had `done` new tokens when it joined at step `joined`."""

    work: Work
    done: int
    joined: int
    ends: int


class SimReplica:
    """One replica on `devices` under lease `epoch`, serving policy `version`."""

    def __init__(
        self, cost: ServingDurations, lengths: LengthSource, version: int, devices: tuple[int, ...],
        update_s: float, slowdown: Callable[[tuple[int, ...]], float],
    ) -> None:  # fmt: skip
        self.cost = cost
        self.version = version
        self.devices = devices
        self._lengths = lengths
        self._update_s = update_s
        self._slowdown = slowdown
        self._life = Lifeline(devices)
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Work, int]] = deque()  # with new tokens so far (after a preemption)
        self._batch: dict[int, _Run] = {}  # in order of joining
        self._ends: list[tuple[int, int]] = []  # heap of (step, sequence); stale entries are skipped
        self._steps = 0
        self._kv = 0  # context tokens in the cache at step `_base_steps`
        self._base_steps = 0  # steps done at `_base_ns`, when the current stretch began
        self._base_ns = 0
        self._alpha = self._beta = 0.0
        self._timer: asyncio.Handle | None = None
        self._stream: Mailbox[TokenChunk | WorkerLost | None] = Mailbox()
        self._emitted = 0

    # ------------------------------------------------------------------------ the contract

    def submit(self, work: Work) -> None:
        self._lengths.announce(work, self.version)
        self._arrived.append((work, 0))
        if len(self._arrived) == 1:  # later ones join with it, or wait behind it
            self._schedule()

    async def abort(self, sequences: Collection[int]) -> list[TokenChunk]:
        self._life.check()
        self._advance(self._steps_by(now_ns()))
        wanted = frozenset(sequences)
        chunks = [self._leave(run) for run in list(self._batch.values()) if run.work.id in wanted]
        for work, done in self._arrived:
            if work.id in wanted:
                chunks.append(self._chunk(work, done))
        self._arrived = deque(item for item in self._arrived if item[0].id not in wanted)
        if chunks:
            self._lengths.forget([chunk.sequence for chunk in chunks])
            self._restart(now_ns())
        return chunks

    async def stream(self) -> AsyncIterator[TokenChunk]:
        while (item := await self._stream.get()) is not None:
            if isinstance(item, WorkerLost):
                raise item
            yield item

    async def update(self, version: int) -> None:
        self._life.check()
        assert not self._batch, "a replica is updated when it holds nothing"
        assert not self._arrived
        await self._life.sleep(self._update_s * self._slowdown(self.devices))
        self.version = version

    async def ping(self) -> int:
        self._life.check()
        return self._emitted

    def load(self) -> WorkerLoad:
        """As of the last batch change, like the last report of a live worker."""
        waiting = sum(work.context_tokens + done for work, done in self._arrived)
        return WorkerLoad(len(self._batch) + len(self._arrived), self._kv + waiting)

    def close(self) -> None:
        self._cancel_timer()
        self._stream.put(None)

    def lose(self, why: str) -> None:
        """The worker dies: whole chunks were streamed before, the rest is gone."""
        if self._life.alive:
            self._advance(self._steps_by(now_ns()))
            for run in self._batch.values():
                streamed = (run.done + self._steps - run.joined) // STREAM_TOKENS * STREAM_TOKENS
                if streamed:
                    self._emit(self._chunk(run.work, streamed, serial=self._emitted))
            self._cancel_timer()
            self._stream.put(self._life.end(why))

    # ------------------------------------------------------------------------ closed-form time

    def _elapsed_s(self, steps: int) -> float:
        n = len(self._batch)
        return steps * self._alpha + self._beta * (self._kv * steps + n * steps * (steps - 1) / 2)

    def _time_of(self, steps: int) -> int:
        """When the stretch has done `steps` steps in all (a count like `_steps`), in ns."""
        return self._base_ns + to_ns(self._elapsed_s(steps - self._base_steps))

    def _steps_by(self, when_ns: int) -> int:
        """Whole steps done by `when_ns`: the root of the quadratic, then made exact."""
        if when_ns <= self._base_ns or not self._batch:
            return self._base_steps
        elapsed = (when_ns - self._base_ns) / 1e9
        square = self._beta * len(self._batch) / 2
        linear = self._alpha + self._beta * self._kv - square
        if square > 0:
            root = 2 * elapsed / (linear + math.sqrt(linear * linear + 4 * square * elapsed))
        else:
            root = elapsed / linear
        steps = self._base_steps + int(root)
        while self._time_of(steps + 1) <= when_ns:
            steps += 1
        while steps > self._base_steps and self._time_of(steps) > when_ns:
            steps -= 1
        return steps

    # ------------------------------------------------------------------------ batch changes

    def _schedule(self) -> None:
        """Set the timer to the next batch change: the first of arrival, end, and a full cache."""
        self._cancel_timer()
        if not self._life.alive or not (self._batch or self._arrived):
            return
        if not self._batch:
            until, when = self._steps, max(now_ns(), self._base_ns)
        else:
            until = self._next_change()
            if self._arrived and self._may_join():
                now = now_ns()
                boundary = self._steps_by(now)
                until = min(until, boundary + (self._time_of(boundary) < now))
            when = self._time_of(until)
        self._timer = self._loop.call_at(when / 1e9, self._change, until)

    def _may_join(self) -> bool:
        work, done = self._arrived[0]
        fits = self._kv + work.context_tokens + done + len(self._batch) < self.cost.kv_capacity_tokens
        return len(self._batch) < self.cost.max_running and fits

    def _next_change(self) -> int:
        """The step at which a sequence ends or the cache is full."""
        while self._ends[0][1] not in self._batch or self._batch[self._ends[0][1]].ends != self._ends[0][0]:
            heapq.heappop(self._ends)
        room = (self.cost.kv_capacity_tokens - self._kv) // len(self._batch)
        full = self._base_steps + max(1, room)
        return min(self._ends[0][0], full) if len(self._batch) > 1 else self._ends[0][0]

    def _change(self, steps: int) -> None:
        """The batch changes after `steps` steps, which is now."""
        self._timer = None
        now = now_ns()
        self._advance(steps)
        self._retire()
        self._preempt()
        prefill_s = self._join()
        self._restart(now + to_ns(prefill_s))

    def _advance(self, steps: int) -> None:
        """Count the steps of the current stretch up to `steps` and begin a new stretch there."""
        self._kv += len(self._batch) * (steps - self._base_steps)
        self._base_ns = self._time_of(steps) if self._batch else self._base_ns
        self._steps = self._base_steps = steps

    def _restart(self, begin_ns: int) -> None:
        """Begin a stretch with the present batch at `begin_ns`."""
        factor = self._slowdown(self.devices)
        self._base_ns = max(begin_ns, self._base_ns)
        self._base_steps = self._steps
        self._alpha = self.cost.alpha_s(len(self._batch)) * factor if self._batch else 0.0
        self._beta = self.cost.beta_s * factor
        self._schedule()

    def _retire(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            ends, sequence = heapq.heappop(self._ends)
            run = self._batch.get(sequence)
            if run is not None and run.ends == ends:
                self._emit(self._leave(run, Finished, self._emitted))
                self._lengths.forget([sequence])

    def _preempt(self) -> None:
        capacity = self.cost.kv_capacity_tokens
        while len(self._batch) > 1 and self._kv + len(self._batch) > capacity:
            run = next(reversed(self._batch.values()))
            done = run.done + self._steps - run.joined
            self._drop(run)
            self._arrived.appendleft((run.work, done))

    def _join(self) -> float:
        """Take in arrivals while they fit; returns the seconds of reading them in."""
        new_tokens = 0
        while self._arrived and (not self._batch or self._may_join()):
            work, done = self._arrived.popleft()
            remaining = self._lengths.remaining(work, self.version) - done
            run = _Run(work, done, self._steps, self._steps + remaining)
            self._batch[work.id] = run
            heapq.heappush(self._ends, (run.ends, work.id))
            self._kv += work.context_tokens + done
            new_tokens += work.context_tokens + done
        return self.cost.prefill_s(new_tokens) * self._slowdown(self.devices) if new_tokens else 0.0

    def _leave(self, run: _Run, form: type[TokenChunk] = TokenChunk, serial: int = -1) -> TokenChunk:
        self._drop(run)
        return self._chunk(run.work, run.done + self._steps - run.joined, form, serial)

    def _drop(self, run: _Run) -> None:
        del self._batch[run.work.id]
        self._kv -= run.work.context_tokens + run.done + self._steps - run.joined

    def _chunk(
        self, work: Work, count: int, form: type[TokenChunk] = TokenChunk, serial: int = -1
    ) -> TokenChunk:
        tokens, logprobs = self._lengths.tokens(work, self.version, count)
        return form(work.id, work.epoch, self.version, count, tokens, logprobs, serial)

    def _emit(self, chunk: TokenChunk) -> None:
        self._stream.put(chunk)
        self._emitted += 1

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

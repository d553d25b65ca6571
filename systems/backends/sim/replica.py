"""Continuous batching on one replica, as arithmetic over time: no clock, no tasks, no tokens.

The scheduler is that of a serving engine with chunked prefill. At every step, in this order:

1. each sequence that generates gets one token of the step's budget
2. each that is still being read in gets as much of the rest as it needs
3. where blocks run out for these, the newest is preempted: it waits first in line, and is read in again
4. if nobody was, waiting sequences are admitted, first come first served, while there is budget, a place,
   and blocks for what they would read in

A step with nothing to read in is a pure decode step. Between two changes of the batch a stretch of k of them
costs   k*alpha[n] + beta[n] * (KV*k + n*k*(k-1)/2)   and is taken at once. A step that reads in is one mixed
step and an event of its own.

Invariants
* `_steps` counts decode steps; a sequence that began to generate at step j with r tokens to go ends after
  step j + r, so a stretch costs O(1) however many sequences run.
* Contexts grow by one token a decode step, so the step at which blocks run out follows from how many
  sequences there are in each residue of their context modulo the block.
* A prefix that a running sequence shares is held once and not read in again; it goes with its last user.
* Where an arrival ends a stretch at its next step boundary and nothing else happens there, the state is
  that boundary's at once (`_look_ahead`): one event less. What still comes before it joins that step, or
  steps back.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from systems.costs.durations import BLOCK, Bounds, Costs

HALF_A_NANOSECOND = 0.5e-9
SAME_MOMENT_S = 1e-9  # a clock of whole nanoseconds may be that late for a step boundary


class Arrival(NamedTuple):
    """A sequence of `context` tokens with `remaining` to generate. Those with the same `prefix` (not -1)
    begin with the same `prefix_tokens` tokens."""

    id: int
    context: int
    remaining: int
    prefix: int = -1
    prefix_tokens: int = 0
    held: int = 0  # of the context, whose cache is brought along


class Ended(NamedTuple):
    """A sequence that ended, when, and how many tokens it generated here."""

    id: int
    time_s: float
    generated: int


class Aborted(NamedTuple):
    """A sequence that was taken out, the tokens that it generated here, and those that were in the cache."""

    id: int
    generated: int
    cached: int


@dataclass(slots=True)
class _Run:
    """A sequence. `context` tokens are to be in the cache before it goes on generating."""

    id: int
    context: int
    remaining: int
    prefix: int  # which shared prefix it begins with, or -1
    prefix_tokens: int
    held: int = 0  # context tokens whose cache was brought along
    order: int = 0  # of admission: the largest is preempted first
    read: int = 0  # context tokens that are in the cache
    shared: int = 0  # of these, held in the prefix's blocks
    joined: int = -1  # the step at which it began to generate, or -1 while it is read in
    generated: int = 0  # before it joined
    state: int = 0  # blocks that hold the state of its linear attention, once it has been begun

    def length(self, steps: int) -> int:
        """Context tokens in the cache after `steps` decode steps in all."""
        return self.read + (steps - self.joined if self.joined >= 0 else 0)

    def own_blocks(self, steps: int) -> int:
        return -(-(self.length(steps) - self.shared) // BLOCK) + self.state


@dataclass(slots=True)
class _Prefix:
    blocks: int = 0
    users: int = 0


class Replica:
    """One replica's batch. Times are seconds on the caller's clock and never go back."""

    def __init__(self, costs: Costs, bounds: Bounds, now_s: float = 0.0) -> None:
        self.costs = costs
        self.bounds = bounds
        self.preemptions = 0
        self.pace = 1.0  # every step that is planned from now on takes so many times as long
        self._time = now_s  # the step boundary that everything below describes
        self._waiting: deque[_Run] = deque()
        self._reading: dict[int, _Run] = {}
        self._generating: dict[int, _Run] = {}
        self._ends: list[tuple[int, int]] = []  # heap of (step, id); entries of those that left are stale
        self._steps = 0
        self._kv = 0  # context tokens of generating sequences
        self._pending = 0  # of those that wait or are read in
        self._free = bounds.blocks
        self._residues = [0] * BLOCK  # generating sequences by (own length - steps) modulo the block
        self._prefixes: dict[int, _Prefix] = {}
        self._admitted = 0
        self._alpha = self._beta = 0.0
        self._next: tuple[float, int] | None = None  # the next change: its time and the step it comes after
        self._mixed: list[tuple[_Run, int]] | None = None  # what the step under way reads in
        self._behind: tuple[float, float, float] | None = None  # looking ahead: time, alpha, beta before it

    # ------------------------------------------------------------------------- asked from outside

    @property
    def sequences(self) -> int:
        return len(self._waiting) + len(self._reading) + len(self._generating)

    def kv_tokens(self, now_s: float) -> int:
        """Context tokens of everything here, as of the last change until `now_s`."""
        ahead = len(self._generating) if self._is_ahead(now_s) else 0
        return self._kv + self._pending - ahead

    def add(self, now_s: float, arrivals: Iterable[Arrival]) -> None:
        """All that arrives at this moment; they join at the next step boundary."""
        runs = [_Run(*arrival) for arrival in arrivals]
        self._waiting.extend(runs)
        self._pending += sum(run.context for run in runs)
        if self._mixed is None:
            if self._admissible():
                self._interrupt(now_s)
        elif self._is_ahead(now_s):  # that step is yet to begin
            self._admit(self._mixed)
            self._read_in(self._mixed)

    def abort(self, now_s: float, sequences: Iterable[int]) -> list[Aborted]:
        """Take these out, and say what those that were there had. The step under way is lost."""
        wanted = frozenset(sequences)
        if not any(run.id in wanted for run in self._here()):
            return []
        self._catch_up(now_s)
        self._undo_mixed()
        self._behind = None
        gone = [run for run in self._waiting if run.id in wanted]
        found = [Aborted(run.id, run.generated, run.held) for run in gone]
        self._waiting = deque(run for run in self._waiting if run.id not in wanted)
        self._pending -= sum(run.context for run in gone)
        for runs in (self._reading, self._generating):
            for run in [run for run in runs.values() if run.id in wanted]:
                found.append(Aborted(run.id, self._generated(run), run.length(self._steps)))
                self._leave(run)
        self._time = max(self._time, now_s)
        self._plan()
        return found

    def next_s(self) -> float | None:
        """When something changes here, if nothing comes from outside."""
        return None if self._next is None else self._next[0]

    def advance(self, now_s: float) -> list[Ended]:
        """Everything that ends until `now_s`, in order."""
        ended: list[Ended] = []
        while self._next is not None and self._next[0] <= now_s:
            self._change(ended)
        return ended

    def progress(self, now_s: float) -> dict[int, int]:
        """Tokens generated here by each sequence that is here, as of the last whole step."""
        self._catch_up(now_s)
        return {run.id: self._generated(run) for run in self._here()}

    def _here(self) -> Iterator[_Run]:
        yield from self._waiting
        yield from self._reading.values()
        yield from self._generating.values()

    # ------------------------------------------------------------------------- closed-form time

    def _elapsed(self, steps: int) -> float:
        n = len(self._generating)
        return steps * self._alpha + self._beta * (self._kv * steps + n * steps * (steps - 1) / 2)

    def _whole_steps(self, seconds: float) -> int:
        """Whole decode steps within `seconds` of the boundary: the root of the quadratic, made exact."""
        if seconds <= 0 or not self._generating:
            return 0
        square = self._beta * len(self._generating) / 2
        linear = self._alpha + self._beta * self._kv - square
        steps = int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))
        while self._elapsed(steps + 1) <= seconds:
            steps += 1
        while steps > 0 and self._elapsed(steps) > seconds:
            steps -= 1
        return steps

    def _catch_up(self, now_s: float) -> None:
        """Take the whole steps until `now_s` that change nothing. Nobody is read in during a stretch."""
        if self._is_ahead(now_s):
            self._step_back()
        if self._mixed is None and self._next is not None:
            steps = min(self._whole_steps(now_s - self._time), self._next[1])
            if steps:
                self._time += self._elapsed(steps)
                self._take(steps)
                self._next = (self._next[0], self._next[1] - steps)

    def _take(self, steps: int) -> None:
        """The state after `steps` more decode steps; their blocks are there."""
        n = len(self._generating)
        self._free -= self._crossings(steps)
        self._steps += steps
        self._kv += n * steps

    def _crossings(self, steps: int) -> int:
        """Blocks that generating sequences begin within `steps` more decode steps.

        One of own length L begins a block with its next token if L is a multiple of the block.
        """
        whole, rest = divmod(steps, BLOCK)
        first, residues = -self._steps % BLOCK, self._residues
        if rest <= first + 1:  # residues first, first - 1, ... without turning over
            part = sum(residues[first - rest + 1 : first + 1])
        else:
            part = sum(residues[: first + 1]) + sum(residues[first - rest + 1 :])
        return whole * len(self._generating) + part

    def _steps_until_full(self) -> int:
        """Decode steps that the free blocks are enough for."""
        n = len(self._generating)
        steps = self._free // n * BLOCK if n else 0
        left = self._free - self._crossings(steps)
        while True:
            left -= self._residues[-(self._steps + steps) % BLOCK]
            if left < 0:
                return steps
            steps += 1

    # ------------------------------------------------------------------------- changes

    def _interrupt(self, now_s: float) -> None:
        """Somebody may join: at the first step boundary from `now_s` on."""
        self._catch_up(now_s)
        if self._next is None or not self._generating:
            self._time = max(self._time, now_s)
            self._plan()
        elif self._time >= now_s - SAME_MOMENT_S:
            self._plan()
        else:
            more = self._next[1] > 1  # else somebody ends there, or blocks run out
            self._next = (self._time + self._elapsed(1), 1)
            if more and self._crossings(2) <= self._free:  # so nobody is preempted there either
                self._look_ahead()

    def _is_ahead(self, now_s: float) -> bool:
        """Is the state that of a step boundary after `now_s`, on a clock of whole nanoseconds?"""
        return self._behind is not None and now_s < self._time - HALF_A_NANOSECOND

    def _due(self) -> tuple[float, int]:
        """The next change, where there must be one."""
        if self._next is None:
            raise RuntimeError("a replica in which nothing is due was asked to change")
        return self._next

    def _look_ahead(self) -> None:
        """Describe the next step boundary already, with who joins there; `_step_back` takes it back."""
        self._behind = (self._time, self._alpha, self._beta)
        self._time, _ = self._due()
        self._take(1)
        self._plan()

    def _step_back(self) -> None:
        """The boundary that was looked ahead to is still to come."""
        if self._behind is None:
            raise RuntimeError("a replica that did not look ahead cannot step back")
        ahead_s = self._time
        for run, _ in reversed(self._mixed or ()):
            del self._reading[run.id]
            self._free += run.own_blocks(self._steps)
            self._drop_prefix(run)
            run.read = run.state = 0
            self._admitted -= 1
            self._waiting.appendleft(run)
        self._steps -= 1
        self._kv -= len(self._generating)
        self._free += self._crossings(1)
        (self._time, self._alpha, self._beta), self._behind, self._mixed = self._behind, None, None
        self._next = (ahead_s, 1)

    def _change(self, ended: list[Ended]) -> None:
        """The stretch or the mixed step under way is over."""
        when, steps = self._due()
        if self._mixed is None:
            self._take(steps)
        else:
            self._finish_mixed(self._mixed)
        self._time, self._mixed, self._behind = when, None, None
        while self._ends and self._ends[0][0] <= self._steps:
            step, sequence = heapq.heappop(self._ends)
            run = self._generating.get(sequence)
            if run is not None and run.joined + run.remaining == step:
                ended.append(Ended(run.id, when, run.generated + run.remaining))
                self._leave(run)
        self._plan()

    def _plan(self) -> None:
        """What happens next from this step boundary on."""
        before = self.preemptions
        chunks = self._schedule()
        n = len(self._generating)
        if chunks:
            self._read_in(chunks)
        elif n:
            self._alpha, self._beta = self.costs.alpha_s(n) * self.pace, self.costs.beta_s(n) * self.pace
            while self._stale(self._ends[0]):
                heapq.heappop(self._ends)
            steps = self._ends[0][0] - self._steps
            if n * steps // BLOCK + n > self._free:  # more blocks than that are never begun
                steps = max(1, min(steps, self._steps_until_full()))
            if self.preemptions > before and self._admissible():
                steps = 1  # nobody is admitted in a step that preempts, but perhaps in the next one
            self._next = (self._time + self._elapsed(steps), steps)
        else:
            self._next = None

    def _read_in(self, chunks: list[tuple[_Run, int]]) -> None:
        """The next step is a mixed one that reads these in."""
        self._mixed = chunks
        self._next = (self._time + self._mixed_s(chunks) * self.pace, 1)

    def _stale(self, entry: tuple[int, int]) -> bool:
        run = self._generating.get(entry[1])
        return run is None or run.joined + run.remaining != entry[0]

    def _newest(self) -> _Run:
        return max([*self._generating.values(), *self._reading.values()], key=lambda run: run.order)

    def _preempt(self, newest: _Run) -> None:
        generated = self._generated(newest)
        self._leave(newest)
        again = _Run(
            newest.id, newest.context + generated - newest.generated, newest.remaining, newest.prefix,
            newest.prefix_tokens,
        )  # fmt: skip
        again.remaining -= generated - newest.generated
        again.generated = generated
        self._waiting.appendleft(again)
        self._pending += again.context
        self.preemptions += 1

    def _admissible(self) -> bool:
        return bool(self._waiting) and len(self._generating) + len(self._reading) < self.bounds.max_running

    def _schedule(self) -> list[tuple[_Run, int]]:
        """Who is read in during the next step, and how many tokens of each; their blocks are taken."""
        if not self._reading and not self._waiting and len(self._generating) <= self._free:
            return []  # blocks for everybody's next token, and nobody to read in
        before = self.preemptions
        while self._crossings(1) > self._free and len(self._generating) + len(self._reading) > 1:
            self._preempt(self._newest())
        if not self._reading and not self._waiting:
            return []
        budget = self.bounds.token_budget - len(self._generating)
        chunks: list[tuple[_Run, int]] = []
        for run in list(self._reading.values()):
            while run.id in self._reading and budget > 0 and not self._give(run, budget, chunks):
                newest = self._newest()
                if newest is run and len(self._generating) + len(self._reading) == 1:
                    self._give(run, budget, chunks, forced=True)
                    break
                chunks = [entry for entry in chunks if entry[0] is not newest]
                self._preempt(newest)
            budget = self.bounds.token_budget - len(self._generating) - sum(chunk for _, chunk in chunks)
        if self.preemptions == before:
            self._admit(chunks)
        return chunks

    def _admit(self, chunks: list[tuple[_Run, int]]) -> None:
        """Waiting sequences, first come first served, as far as budget, places and blocks go."""
        budget = self.bounds.token_budget - len(self._generating) - sum(chunk for _, chunk in chunks)
        while budget > 0 and self._admissible():
            run = self._waiting[0]
            self._use_prefix(run)
            alone = not (self._generating or self._reading)
            if not self._bring(run, forced=alone) or not self._give(run, budget, chunks, forced=alone):
                self._free += run.own_blocks(self._steps)
                self._drop_prefix(run)
                run.read = run.state = 0
                break
            self._waiting.popleft()
            self._admitted += 1
            run.order = self._admitted
            self._reading[run.id] = run
            budget -= chunks[-1][1]

    def _bring(self, run: _Run, forced: bool) -> bool:
        """Blocks for the cache that it has brought along; the last token is always computed."""
        held = min(run.held, run.context - 1)
        if held <= run.read:
            return True
        blocks = -(-(held - run.shared) // BLOCK) - -(-(run.read - run.shared) // BLOCK)
        if blocks > self._free - self._crossings(1) and not forced:
            return False
        self._free -= blocks
        run.read = held
        self._keep_prefix(run)
        return True

    def _give(self, run: _Run, budget: int, chunks: list[tuple[_Run, int]], forced: bool = False) -> bool:
        """A chunk for `run`, if there are blocks for all of it beside those that generating needs."""
        length, chunk = run.read - run.shared, min(run.context - run.read, budget)
        blocks = -(-(length + chunk) // BLOCK) - -(-length // BLOCK)
        state = self.bounds.state_blocks - run.state
        if blocks + state > self._free - self._crossings(1) and not forced:
            return False
        self._free -= blocks + state
        run.state += state
        run.read += chunk
        chunks.append((run, chunk))
        self._keep_prefix(run)
        return True

    def _undo_mixed(self) -> None:
        """A mixed step is lost: what it was to read in is not there. A prefix that is shared stays."""
        for run, chunk in self._mixed or ():
            kept = max(run.read - chunk, run.shared)
            self._free += -(-(run.read - run.shared) // BLOCK) - -(-(kept - run.shared) // BLOCK)
            run.read = kept
        self._mixed = None

    def _mixed_s(self, chunks: list[tuple[_Run, int]]) -> float:
        queries = sum(chunk for _, chunk in chunks)
        pairs = sum(chunk * (run.read - chunk) + chunk * (chunk + 1) / 2 for run, chunk in chunks)
        context = sum(run.read for run, _ in chunks)
        starting = sum(run.read == run.context for run, _ in chunks)
        return self.costs.mixed_s(len(self._generating), self._kv, queries, pairs, context, starting)

    def _finish_mixed(self, chunks: list[tuple[_Run, int]]) -> None:
        """Generating sequences have one more token; who is read in to the end has its first one."""
        self._take(1)
        for run, _ in chunks:
            if run.read == run.context and run.id in self._reading:
                del self._reading[run.id]
                self._begin(run)

    def _begin(self, run: _Run) -> None:
        """It has generated its first token, which is not in the cache yet."""
        run.joined = self._steps - 1
        run.read -= 1  # so that its length is that of its context now, and grows from the next step on
        self._generating[run.id] = run
        self._pending -= run.context
        self._kv += run.length(self._steps)
        self._residues[(run.length(self._steps) - run.shared - self._steps) % BLOCK] += 1
        heapq.heappush(self._ends, (run.joined + run.remaining, run.id))

    def _generated(self, run: _Run) -> int:
        return run.generated + (self._steps - run.joined if run.joined >= 0 else 0)

    def _leave(self, run: _Run) -> None:
        """Its blocks are free again."""
        if run.id in self._generating:
            del self._generating[run.id]
            length = run.length(self._steps)
            self._kv -= length
            self._residues[(length - run.shared - self._steps) % BLOCK] -= 1
        else:
            del self._reading[run.id]
            self._pending -= run.context
        self._free += run.own_blocks(self._steps)
        self._drop_prefix(run)

    # ------------------------------------------------------------------------- shared prefixes

    def _use_prefix(self, run: _Run) -> None:
        """Take over the whole blocks of a prefix that is there; the last token is always computed."""
        prefix = self._prefixes.get(run.prefix)
        if prefix is not None and run.shared == 0:
            shared = min(prefix.blocks * BLOCK, (run.context - 1) // BLOCK * BLOCK)
            run.read = run.shared = shared
            prefix.users += 1 if shared else 0

    def _keep_prefix(self, run: _Run) -> None:
        """The first to have read a prefix in hands its whole blocks over to those that follow."""
        if run.prefix < 0 or run.shared or run.read < run.prefix_tokens or run.prefix in self._prefixes:
            return
        shared = min(run.prefix_tokens, run.context - 1) // BLOCK * BLOCK
        if shared:
            self._prefixes[run.prefix] = _Prefix(shared // BLOCK, users=1)
            run.shared = shared

    def _drop_prefix(self, run: _Run) -> None:
        if run.shared:
            prefix = self._prefixes[run.prefix]
            prefix.users -= 1
            run.shared = 0
            if not prefix.users:
                self._free += prefix.blocks
                del self._prefixes[run.prefix]

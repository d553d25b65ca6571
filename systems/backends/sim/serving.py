"""A simulated serving replica: the arithmetic of `replica.py` on the loop's clock, under the contract.

A token of the workload may stand for several of the modelled pair (`token_scale`): lengths are multiplied on
the way in and divided on the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from systems.backends.base import Finished, TokenChunk, Work, WorkerLoad, WorkerLost
from systems.backends.sim.lengths import LengthSource
from systems.backends.sim.lifeline import Lifeline
from systems.backends.sim.replica import Arrival, Replica
from systems.costs.durations import ServingDurations
from systems.loop.clock import now_ns, to_ns
from systems.loop.mailbox import Mailbox
from systems.types import NS_PER_S, Role

STREAM_TOKENS = 16  # a live worker streams about this often; a simulated loss keeps whole chunks only


class SimReplica:
    """One replica on `devices`, serving policy `version`."""

    def __init__(
        self, cost: ServingDurations, lengths: LengthSource, version: int, devices: tuple[int, ...],
        update_s: float, slowdown: Callable[[tuple[int, ...]], float],
    ) -> None:  # fmt: skip
        self.version = version
        self.devices = devices
        self._lengths = lengths
        self._update_s = update_s
        self._slowdown = slowdown
        self._scale = cost.token_scale
        self._life = Lifeline(devices)
        self._loop = asyncio.get_running_loop()
        self._replica = Replica(cost.costs(), cost.bounds(), now_ns() / NS_PER_S)
        self._works: dict[int, Work] = {}
        self._fresh: list[Work] = []  # submitted at this moment: they join together
        self._fresh_tokens = 0
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # what the timer is set to
        self._stream: Mailbox[TokenChunk | WorkerLost | None] = Mailbox()
        self._emitted = 0

    # ------------------------------------------------------------------------ the contract

    def submit(self, work: Work) -> None:
        self._lengths.announce(work, self.version)
        self._works[work.id] = work
        self._fresh.append(work)
        self._fresh_tokens += work.context_tokens
        if len(self._fresh) == 1:
            self._loop.call_soon(self._join)

    async def abort(self, sequences: Collection[int]) -> list[TokenChunk]:
        self._life.check()
        self._settle()
        self._join()
        self._replica.pace = self._slowdown(self.devices)
        found = self._replica.abort(now_ns() / NS_PER_S, sequences)
        chunks = [self._chunk(self._works.pop(number), generated) for number, generated in found]
        if chunks:
            self._lengths.forget([chunk.sequence for chunk in chunks])
            self._schedule()
        return chunks

    async def stream(self) -> AsyncIterator[TokenChunk]:
        while (item := await self._stream.get()) is not None:
            if isinstance(item, WorkerLost):
                raise item
            yield item

    async def update(self, version: int) -> None:
        self._life.check()
        if self._works:
            raise ValueError(f"asked to load version {version} with {len(self._works)} sequences running")
        await self._life.sleep(self._update_s * self._slowdown(self.devices))
        self.version = version

    async def ping(self) -> int:
        self._life.check()
        return self._emitted

    def load(self) -> WorkerLoad:
        """As of the last batch change, like the last report of a live worker."""
        return WorkerLoad(
            len(self._works), self._replica.kv_tokens(now_ns() / NS_PER_S) / self._scale + self._fresh_tokens
        )

    def progress(self) -> Mapping[int, int]:
        """A live worker would have streamed whole chunks of this."""
        now_s = now_ns() / NS_PER_S
        return {n: generated // self._scale for n, generated in self._replica.progress(now_s).items()}

    def close(self) -> None:
        self._cancel_timer()
        self._stream.put(None)

    def lose(self, why: str) -> None:
        """The worker dies: whole chunks were streamed before, the rest is gone."""
        if self._life.alive:
            for number, generated in self._replica.progress(now_ns() / NS_PER_S).items():
                streamed = generated // self._scale // STREAM_TOKENS * STREAM_TOKENS
                if streamed:
                    self._emit(self._chunk(self._works[number], streamed * self._scale, serial=self._emitted))
            self._cancel_timer()
            self._stream.put(self._life.end(why))

    # ------------------------------------------------------------------------ on the clock

    def _settle(self) -> None:
        """What is due at this very nanosecond comes first."""
        while (due := self._replica.next_s()) is not None and to_ns(due) <= now_ns():
            self._change(due)

    def _join(self) -> None:
        """What was submitted at this moment is now the replica's."""
        works, self._fresh, self._fresh_tokens = self._fresh, [], 0
        if works and self._life.alive:
            self._replica.pace = self._slowdown(self.devices)
            arrivals = [self._arrival(work) for work in works if work.id in self._works]
            self._replica.add(now_ns() / NS_PER_S, arrivals)
            self._schedule()

    def _arrival(self, work: Work) -> Arrival:
        """Responses of a group begin with its prompt; judgements of a sample with all that they read."""
        scale = self._scale
        return Arrival(
            work.id,
            work.context_tokens * scale,
            self._lengths.remaining(work, self.version) * scale,
            work.group if work.role is Role.ROLLOUT else work.sample,
            work.prompt.length * scale,
        )

    def _schedule(self) -> None:
        due = self._replica.next_s()
        if self._timer is not None and due == self._due:
            return
        self._cancel_timer()
        if due is not None and self._life.alive:
            self._due = due
            self._timer = self._loop.call_at(due, self._change, due)

    def _change(self, due: float) -> None:
        self._timer = None
        self._replica.pace = self._slowdown(self.devices)
        ended = self._replica.advance(due)
        for end in ended:
            work = self._works.pop(end.id)
            self._emit(self._chunk(work, end.generated, Finished, self._emitted))
        if ended:
            self._lengths.forget([end.id for end in ended])
        self._schedule()

    def _chunk(
        self, work: Work, generated: int, form: type[TokenChunk] = TokenChunk, serial: int = -1
    ) -> TokenChunk:
        count = generated // self._scale
        tokens, logprobs = self._lengths.tokens(work, self.version, count)
        end = self._lengths.end(work, self.version) if form is Finished else None
        return form(work.id, work.epoch, self.version, count, tokens, logprobs, serial, end)

    def _emit(self, chunk: TokenChunk) -> None:
        self._stream.put(chunk)
        self._emitted += 1

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

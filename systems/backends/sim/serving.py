"""A simulated serving replica: the arithmetic of `replica.py` on the loop's clock, under the contract.

A token of the workload may stand for several of the modelled pair (`token_scale`): lengths are multiplied on
the way in and divided on the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from systems.backends.base import Finished, Hear, TokenChunk, Work
from systems.backends.sim.host_cache import HostCache
from systems.backends.sim.lengths import LengthSource
from systems.backends.sim.lifeline import Lifeline
from systems.backends.sim.replica import Aborted, Arrival, Replica
from systems.costs.durations import ServingDurations
from systems.loop.clock import now_ns, to_ns
from systems.types import NS_PER_S, Role

STREAM_TOKENS = 16  # a live worker streams about this often; a simulated loss keeps whole chunks only


class SimReplica:
    """One replica on `devices`, serving policy `version`."""

    def __init__(
        self, cost: ServingDurations, lengths: LengthSource, version: int, devices: tuple[int, ...],
        update_s: float, slowdown: Callable[[tuple[int, ...]], float], host: HostCache,
        copy_s: Callable[[float], float],
    ) -> None:  # fmt: skip
        self.version = version
        self.devices = devices
        self._lengths = lengths
        self._update_s = update_s
        self._slowdown = slowdown
        self._cost = cost
        self._host = host
        self._copy_s = copy_s
        self._scale = cost.token_scale
        self._life = Lifeline(devices)
        self._loop = asyncio.get_running_loop()
        self._replica = Replica(cost.costs(), cost.bounds(), now_ns() / NS_PER_S)
        self._works: dict[int, Work] = {}
        self._arriving: dict[int, int] = {}  # sequences whose caches come in, and how many tokens of theirs
        self._copied_s = 0.0  # until when the replica's link is taken by caches that come in
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # what the timer is set to
        self._hear: Hear = lambda said: None
        self._emitted = 0

    # ------------------------------------------------------------------------ the contract

    def submit(self, works: Collection[Work]) -> None:
        for work in works:
            self._lengths.announce(work, self.version)
            self._works[work.id] = work
        self._host.drop([work.id for work in works])  # read back now, or of no use any more
        brought = [work for work in works if work.cached_tokens]
        if brought and self._life.alive:
            moved = sum(self._cost.cache_bytes(work.cached_tokens) for work in brought)
            copied_s = self._copy_s(moved) * self._slowdown(self.devices)
            self._copied_s = max(self._copied_s, now_ns() / NS_PER_S) + copied_s
            self._arriving.update({work.id: work.cached_tokens * self._scale for work in brought})
            self._loop.call_at(self._copied_s, self._add, brought)
        self._add([work for work in works if not work.cached_tokens])

    def listen(self, hear: Hear) -> None:
        self._hear = hear

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        self._life.check()
        self._settle()
        self._replica.pace = self._slowdown(self.devices)
        found = self._replica.abort(now_ns() / NS_PER_S, sequences)
        found += [Aborted(n, 0, self._arriving.pop(n)) for n in sequences if n in self._arriving]
        chunks = []
        moved = 0.0
        for number, generated, cached in found:
            work = self._works.pop(number)
            cached = cached // self._scale if keep else 0
            size = self._cost.cache_bytes(cached) if cached else 0.0
            if not size or not self._host.keep(number, size * self._cost.devices):
                cached, size = 0, 0.0
            moved += size
            chunks.append(self._chunk(work, generated)._replace(cached_tokens=cached))
        if chunks:
            self._lengths.forget([chunk.sequence for chunk in chunks])
            self._schedule()
        if moved:
            await self._life.sleep(self._copy_s(moved) * self._slowdown(self.devices))
        return chunks

    async def update(self, version: int, keep: bool = False) -> None:
        self._life.check()
        if self._works and not keep:
            raise ValueError(f"asked to load version {version} with {len(self._works)} sequences running")
        held = self._pause() if keep else []
        try:
            await self._life.sleep(self._update_s * self._slowdown(self.devices))
            self.version = version
        finally:  # also if the update is given up: they are there all the same
            for work in held:
                self._lengths.announce(work, self.version)
            self._add(held)

    def _pause(self) -> list[Work]:
        """Everything stops where it is, and streams what it has; its caches stay."""
        self._settle()
        self._replica.pace = self._slowdown(self.devices)
        held = []
        for number, generated, cached in self._replica.abort(now_ns() / NS_PER_S, list(self._works)):
            chunk = self._chunk(self._works[number], generated, serial=self._emitted)
            if chunk.count:
                self._emit(chunk)
            work = self._works[number]
            work = work._replace(
                length=work.length + chunk.count, tokens=work.tokens + chunk.tokens,
                cached_tokens=cached // self._scale,
            )  # fmt: skip
            self._works[number] = work
            self._arriving[number] = cached
            held.append(work)
        self._lengths.forget([work.id for work in held])
        self._schedule()
        return held

    async def ping(self) -> int:
        self._life.check()
        return self._emitted

    def kv_tokens(self) -> float:
        """As of the last batch change, like the last report of a live worker."""
        here = self._replica.kv_tokens(now_ns() / NS_PER_S)
        return (here + sum(self._arriving.values()) if self._arriving else here) / self._scale

    def progress(self) -> Mapping[int, int]:
        """A live worker would have streamed whole chunks of this."""
        now_s = now_ns() / NS_PER_S
        return {n: generated // self._scale for n, generated in self._replica.progress(now_s).items()}

    def close(self) -> None:
        self._cancel_timer()
        self._hear = lambda said: None

    def lose(self, why: str) -> None:
        """The worker dies: whole chunks were streamed before, the rest is gone."""
        if self._life.alive:
            for number, generated in self._replica.progress(now_ns() / NS_PER_S).items():
                streamed = generated // self._scale // STREAM_TOKENS * STREAM_TOKENS
                if streamed:
                    self._emit(self._chunk(self._works[number], streamed * self._scale, serial=self._emitted))
            self._cancel_timer()
            self._hear(self._life.end(why))

    # ------------------------------------------------------------------------ on the clock

    def _settle(self) -> None:
        """What is due at this very nanosecond comes first."""
        while (due := self._replica.next_s()) is not None and to_ns(due) <= now_ns():
            self._change(due)

    def _add(self, works: list[Work]) -> None:
        """These begin; those that were aborted while their caches came in are not here any more."""
        works = [work for work in works if self._works.get(work.id) is work]
        if works and self._life.alive:
            self._replica.pace = self._slowdown(self.devices)
            for work in works:
                self._arriving.pop(work.id, None)
            self._replica.add(now_ns() / NS_PER_S, map(self._arrival, works))
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
            work.cached_tokens * scale,
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
        ended = [
            self._chunk(self._works.pop(end.id), end.generated, Finished, serial)
            for serial, end in enumerate(self._replica.advance(due), self._emitted)
        ]
        if ended:
            self._lengths.forget([chunk.sequence for chunk in ended])
        self._schedule()
        for chunk in ended:  # last, because whoever hears of it may close this replica
            self._emit(chunk)

    def _chunk(
        self, work: Work, generated: int, form: type[TokenChunk] = TokenChunk, serial: int = -1
    ) -> TokenChunk:
        count = generated // self._scale
        tokens, logprobs = self._lengths.tokens(work, self.version, count)
        end = self._lengths.end(work, self.version) if form is Finished else None
        return form(work.id, work.epoch, self.version, count, tokens, logprobs, serial, end)

    def _emit(self, chunk: TokenChunk) -> None:
        self._emitted += 1
        self._hear(chunk)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

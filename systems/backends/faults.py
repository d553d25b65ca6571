"""Fault injection over any backend: lost workers, failed loads, slow devices, lost and doubled replies.

The real runtime runs on top of this wrapper unchanged. What goes wrong is a value (`Fault`s at given
times, `Noise` from a seeded stream), so a failing run can be repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass

from systems.backends.base import (
    Backend,
    Hear,
    ServingWorker,
    TokenChunk,
    TrainingWorker,
    Work,
    WorkerLost,
)
from systems.types import Kind, Lease, PhaseDone, Shift


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """The worker on `device` dies `at_s` seconds into the run."""

    at_s: float
    device: int


@dataclass(frozen=True, slots=True)
class Noise:
    """Probabilities: of a chunk being lost, doubled or late, and of a shift failing while it loads."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 5.0
    failed_load: float = 0.0


class FaultyBackend:
    """`inner`, with faults."""

    def __init__(
        self, inner: Backend, faults: tuple[Fault, ...], noise: Noise | None = None, seed: int = 0
    ) -> None:
        self.inner = inner
        self.kind: Kind = inner.kind
        self._faults = faults
        self._noise = noise or Noise()
        self._rng = random.Random(f"{seed}/noise")
        self._timers: list[asyncio.TimerHandle] = []

    async def prepare(self) -> None:
        await self.inner.prepare()

    def start(self) -> None:
        self.inner.start()
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(f.at_s, self.inner.lose, f.device) for f in self._faults]

    async def shift(self, shift: Shift, version: int) -> AsyncIterator[PhaseDone]:
        fails = self._rng.random() < self._noise.failed_load
        async for done in self.inner.shift(shift, version):
            yield done
            if fails and done.step.value == "load":
                raise WorkerLost(shift.devices[:1], "failed while loading")

    def serving(self, lease: Lease) -> ServingWorker:
        worker = self.inner.serving(lease)
        noise = self._noise
        return NoisyWorker(worker, noise, self._rng) if noise.lost + noise.doubled + noise.late else worker

    def training(self, lease: Lease) -> TrainingWorker:
        return self.inner.training(lease)

    async def restart(self, device: int) -> None:
        await self.inner.restart(device)

    def lose(self, device: int) -> None:
        self.inner.lose(device)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.inner.close()


class NoisyWorker:
    """A serving worker whose answers get lost, come twice, or come late."""

    def __init__(self, inner: ServingWorker, noise: Noise, rng: random.Random) -> None:
        self._inner = inner
        self._noise = noise
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._late: deque[TokenChunk | WorkerLost] = deque()  # on their way, in order
        self._late_until = 0.0

    def listen(self, hear: Hear) -> None:
        self._hear = hear
        self._inner.listen(self._pass_on)

    def _pass_on(self, said: TokenChunk | WorkerLost) -> None:
        noise = self._noise
        if isinstance(said, WorkerLost):  # the news of a death is an answer too
            self._tell(said, late=noise.late > 0)
            return
        draw = self._rng.random()
        if draw >= noise.lost:
            self._tell(said, late=draw < noise.lost + noise.late)
        if draw > 1 - noise.doubled:
            self._tell(said, late=False)

    def _tell(self, said: TokenChunk | WorkerLost, late: bool) -> None:
        """Now or later, but never before what was said earlier."""
        if late:
            self._late_until = max(self._late_until, self._loop.time()) + self._noise.late_s
        if late or self._late:
            self._late.append(said)
            self._loop.call_at(self._late_until, lambda: self._hear(self._late.popleft()))
        else:
            self._hear(said)

    def submit(self, works: Collection[Work]) -> None:
        self._inner.submit(works)

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        return await self._inner.abort(sequences, keep)

    async def update(self, version: int, keep: bool = False) -> None:
        await self._inner.update(version, keep)

    async def ping(self) -> int:
        return await self._inner.ping()

    def kv_tokens(self) -> float:
        return self._inner.kv_tokens()

    def progress(self) -> Mapping[int, int]:
        return self._inner.progress()

    def close(self) -> None:
        self._inner.close()

"""Fault injection over any backend: lost workers, failed loads, slow devices, lost and doubled replies.

The real runtime runs on top of this wrapper unchanged. What goes wrong is a value (`Fault`s at given
times, `Noise` from a seeded stream), so a failing run can be repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass

from systems.backends.base import (
    Backend,
    ServingWorker,
    TokenChunk,
    TrainingWorker,
    Work,
    WorkerLoad,
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

    async def stream(self) -> AsyncIterator[TokenChunk]:
        noise = self._noise
        try:
            async for chunk in self._inner.stream():
                draw = self._rng.random()
                if draw < noise.lost:
                    continue
                if draw < noise.lost + noise.late:
                    await asyncio.sleep(noise.late_s)
                yield chunk
                if draw > 1 - noise.doubled:
                    yield chunk
        except WorkerLost:
            if noise.late:  # the news of a death is an answer too
                await asyncio.sleep(noise.late_s)
            raise

    def submit(self, work: Work) -> None:
        self._inner.submit(work)

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        return await self._inner.abort(sequences, keep)

    async def update(self, version: int, keep: bool = False) -> None:
        await self._inner.update(version, keep)

    async def ping(self) -> int:
        return await self._inner.ping()

    def load(self) -> WorkerLoad:
        return self._inner.load()

    def progress(self) -> Mapping[int, int]:
        return self._inner.progress()

    def close(self) -> None:
        self._inner.close()

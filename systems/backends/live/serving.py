"""A live replica as the runtime sees it: a lease on a worker process that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from systems.backends.base import Finished, Hear, TokenChunk, Work
from systems.backends.live import wire
from systems.backends.live.cluster import Worker
from systems.backends.live.store import ParameterStore

POLICY = "policy"  # its name in the store


class LiveReplica:
    """One serving lease. What it holds is counted here, from what was submitted and streamed."""

    def __init__(self, worker: Worker, store: ParameterStore) -> None:
        self._worker = worker
        self._store = store
        self._held: dict[int, int] = {}  # sequence -> context tokens
        self._kv_tokens = 0
        self._hear: Hear = _nobody

    def submit(self, works: Collection[Work]) -> None:
        for work in works:
            self._held[work.id] = work.context_tokens
            self._kv_tokens += work.context_tokens
        self._worker.tell("submit", works=[wire.work_to_json(work) for work in works])

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        """Its caches are dropped: `keep` is not done here, and the chunks say so."""
        answer = await self._worker.ask("abort", sequences=list(sequences))
        chunks = [wire.chunk_from_json(raw) for raw in answer]
        for chunk in chunks:
            self._drop(chunk.sequence)
        return chunks

    def listen(self, hear: Hear) -> None:
        self._hear = hear
        self._worker.on_chunks = self._take
        self._worker.on_end = hear
        if self._worker.lost is not None:
            asyncio.get_running_loop().call_soon(hear, self._worker.lost)

    def _take(self, chunks: list[Any]) -> None:
        for raw in chunks:
            chunk = wire.chunk_from_json(raw)
            if isinstance(chunk, Finished):
                self._drop(chunk.sequence)
            elif chunk.sequence in self._held:
                self._held[chunk.sequence] += chunk.count
                self._kv_tokens += chunk.count
            self._hear(chunk)

    def _drop(self, sequence: int) -> None:
        self._kv_tokens -= self._held.pop(sequence, 0)

    async def update(self, version: int, keep: bool = False) -> None:
        """Map another version; the old one is free once the worker has answered."""
        worker, store = self._worker, self._store
        worker.check()
        segment = store.acquire(POLICY, version, worker.device)
        await worker.ask(
            "update",
            [segment],
            version=version,
            segment=segment.number,
            layout=store.layout(POLICY),
            keep=keep,
        )
        store.release(worker.device, POLICY, but=version)

    async def ping(self) -> int:
        sent: int = await self._worker.ask("ping")
        return sent

    async def time_steps(self) -> list[list[float]]:
        """[sequences, context tokens, tokens read in, seconds] of every step since the last call.

        The worker times its steps from the first call on (calibration).
        """
        times: list[list[float]] = await self._worker.ask("time_steps")
        return times

    def kv_tokens(self) -> float:
        return self._kv_tokens

    def progress(self) -> Mapping[int, int]:
        """Nothing is known beyond what was streamed, which happens all the time."""
        return {}

    def close(self) -> None:
        self._hear = self._worker.on_end = _nobody


def _nobody(said: object) -> None:
    """Who hears what a worker says that nobody listens to."""

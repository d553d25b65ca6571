"""The live training unit as the pipeline sees it: ranks in worker processes, the first one leads.

| step of the pipeline | what the ranks do                                                             |
|----------------------|-------------------------------------------------------------------------------|
| begin                | the leader rewinds; all take its weights, and prepare their micro-batches      |
| accumulate           | the next rank in turn is told to compute a gradient; nobody waits               |
| step                 | all gradients are awaited; the leader applies them in order; all take its weights |
| publish              | the leader writes weights and state to the store                                |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from systems.backends.live import wire
from systems.backends.live.cluster import Limits, Worker
from systems.backends.live.serving import POLICY
from systems.backends.live.store import ParameterStore, Segment, floats
from systems.batching import Batch, MicroBatch
from systems.types import NotFinite, TrainStats

STATE = "state"  # the name in the store of what a training step starts from


class LiveTrainer:
    """One training lease on `workers`, which have loaded the state of `version`."""

    def __init__(self, workers: Sequence[Worker], store: ParameterStore, limits: Limits) -> None:
        self._workers = tuple(workers)
        self._leader = self._workers[0]
        self._store = store
        self._limit_s = limits.train_s
        self._exchange: Segment | None = None
        self._gradients: list[asyncio.Task[Any]] = []
        self._refreshed = True

    async def begin(self, batch: Batch) -> None:
        self._cancel()
        exchange = self._exchange_for(batch)
        await self._leader.ask("rewind", [exchange], self._limit_s, exchange=exchange.number)
        content = wire.batch_to_json(batch)
        await together(
            worker.ask("begin", [exchange], self._limit_s, batch=content, exchange=exchange.number)
            for worker in self._workers
        )

    async def accumulate(self, micro: MicroBatch) -> None:
        """Hand it to its rank; `step` waits for it."""
        worker = self._workers[micro.index % len(self._workers)]
        worker.check()
        slot = len(self._gradients)
        asked = worker.ask("gradient", within_s=self._limit_s, mini=micro.mini_batch, slot=slot)
        self._gradients.append(asyncio.create_task(asked))

    async def gradients(self) -> list[Any]:
        """Waits for those that were asked for."""
        return await together(self._gradients)

    async def step(self) -> TrainStats:
        parts = await self.gradients()
        self._gradients = []
        for name, value in (item for part in parts for item in part.items()):
            if value is None:  # JSON has no other way to say it
                raise NotFinite(f"training diverged: {name} of a micro-batch is not a finite number")
        stats = await self._leader.ask("step", within_s=self._limit_s, parts=parts)
        for worker in self._workers[1:]:
            worker.tell("refresh")
        return TrainStats({name: math.nan if value is None else value for name, value in stats.items()})

    async def publish(self) -> int:
        store = self._store
        kept = {name: store.layout(name) for name in (POLICY, STATE)}
        blank = {name: store.blank(floats(layout)) for name, layout in kept.items()}
        version: int = await self._leader.ask(
            "publish", list(blank.values()), weights=blank[POLICY].number, state=blank[STATE].number
        )
        for name, segment in blank.items():
            store.put(name, version, segment, kept[name])
        return version

    def close(self) -> None:
        """A rank that outlives the unit may still write gradients, so their memory is not used again."""
        self._cancel()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _cancel(self) -> None:
        for task in self._gradients:
            task.cancel()
        self._gradients = []

    def _exchange_for(self, batch: Batch) -> Segment:
        """A slot for each micro-batch of a mini-batch, and one for the leader's weights."""
        slots = 1 + max(len(mini) for mini in batch.mini_batches)
        length = slots * sum(shape_floats for shape_floats in self._parameter_floats())
        if self._exchange is None or self._exchange.length != length:
            self.close()
            self._exchange = self._store.blank(length)
        return self._exchange

    def _parameter_floats(self) -> list[int]:
        layout = self._store.layout(STATE)
        return [floats(((name, shape),)) for name, shape in layout if name.startswith("weight.")]


async def together(requests: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all; then report the first failure."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

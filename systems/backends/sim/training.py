"""A simulated training unit: durations from the cost model, gradients from a `Learner` if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from systems.backends.sim.lifeline import Lifeline
from systems.batching import Batch, MicroBatch
from systems.costs.durations import ClusterDurations
from systems.types import TrainStats


class Learner(Protocol):
    """What training really computes: nothing in a simulation, GRPO where tokens are real."""

    def begin(self, batch: Batch) -> None: ...

    def accumulate(self, micro: MicroBatch) -> None: ...

    def step(self) -> TrainStats: ...

    def publish(self) -> int: ...


class CountingLearner:
    """Computes nothing and counts versions."""

    def __init__(self) -> None:
        self._version = 0
        self._begun = 0

    def begin(self, batch: Batch) -> None:
        self._begun = batch.version

    def accumulate(self, micro: MicroBatch) -> None:
        pass

    def step(self) -> TrainStats:
        return TrainStats()

    def publish(self) -> int:
        self._version = self._begun + 1
        return self._version


class SimTrainer:
    """The training unit on `devices`."""

    def __init__(
        self, cost: ClusterDurations, learner: Learner, devices: tuple[int, ...],
        slowdown: Callable[[tuple[int, ...]], float],
    ) -> None:  # fmt: skip
        self.devices = devices
        self._cost = cost
        self._learner = learner
        self._slowdown = slowdown
        self._life = Lifeline(devices)

    async def begin(self, batch: Batch) -> None:
        self._life.check()
        self._learner.begin(batch)

    async def accumulate(self, micro: MicroBatch) -> None:
        await self._sleep(
            self._cost.training.micro_s(micro.total_tokens, micro.total_pairs, len(self.devices))
        )
        self._learner.accumulate(micro)

    async def step(self) -> TrainStats:
        await self._sleep(self._cost.training.step_s(len(self.devices)))
        return self._learner.step()

    async def publish(self) -> int:
        await self._sleep(self._cost.publish_s(len(self.devices)))
        return self._learner.publish()

    def close(self) -> None:
        pass

    def lose(self, why: str) -> None:
        self._life.end(why)

    async def _sleep(self, seconds: float) -> None:
        await self._life.sleep(seconds * self._slowdown(self.devices))

"""The live backend: real workers of a cluster, measured time.

A worker process outlives its role. A shift tells it to give one role up and to take another one on, and
every phase ends when the slowest of the shift's workers has answered. A replica is one worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from torch import Tensor

from systems.backends.live.cluster import Cluster, Worker
from systems.backends.live.roles import Generation, Learning
from systems.backends.live.serving import POLICY, LiveReplica
from systems.backends.live.store import ParameterStore, floats
from systems.backends.live.training import STATE, LiveTrainer, together
from systems.learning.trainer import GrpoLearner
from systems.model.qwen3 import Qwen3
from systems.model.weights import to_standard
from systems.types import Kind, Lease, PhaseDone, Placement, Role, Shift, Step

JUDGE, REFERENCE = "judge", "reference"  # names in the store; they have one version, 0
SERVES = {Role.ROLLOUT: POLICY, Role.REWARD: JUDGE}


class LiveBackend:
    """Worker processes of `cluster` that generate with `policy` and `judge` and train `policy`."""

    kind = Kind.MEASURED

    def __init__(
        self, cluster: Cluster, policy: Qwen3, judge: Qwen3, generation: Mapping[Role, Generation],
        learning: Learning,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.store = ParameterStore()
        self.generation = dict(generation)
        self._learning = learning
        self._last: dict[str, Tensor] = {}
        learner = GrpoLearner(policy, learning.grpo, learning.vocab, published=lambda version, weights: None)
        for name, state in (
            (POLICY, learner.weights()), (REFERENCE, learner.weights()), (STATE, learner.state()),
            (JUDGE, to_standard(judge)),
        ):  # fmt: skip
            self.store.store(name, 0, state)

    async def prepare(self) -> None:
        await self.cluster.prepare()

    def start(self) -> None:
        self.cluster.watch()

    # ------------------------------------------------------------------------------- shifting

    async def shift(self, shift: Shift, version: int) -> AsyncIterator[PhaseDone]:
        keeper = -1 - shift.id  # what is to be loaded is kept, whatever is published meanwhile
        self.store.acquire(POLICY, version, keeper)
        try:
            yield PhaseDone(Step.PARK)  # every publish leaves the training state in the store
            await self._all(shift.sources, "release")
            for source in shift.sources:
                for device in source.devices:
                    self.store.release(device)
            yield PhaseDone(Step.RELEASE)
            await together([load for target in shift.targets for load in self._loads(target, version)])
            yield PhaseDone(Step.LOAD, max(map(self._bytes, shift.targets), default=0))
            await self._all(shift.targets, "warm")
            yield PhaseDone(Step.WARM)
            await self._all(shift.targets, "ready")
            yield PhaseDone(Step.READY)
        finally:
            self.store.release(keeper)

    async def _all(self, placements: Sequence[Placement], op: str) -> None:
        await together([worker.ask(op) for placement in placements for worker in self._workers(placement)])

    def _workers(self, placement: Placement) -> list[Worker]:
        return [self.cluster.workers[device] for device in placement.devices]

    def _loads(self, target: Placement, version: int) -> list[Coroutine[Any, Any, Any]]:
        workers = self._workers(target)
        if target.role is not Role.TRAIN:
            return [self._load_serving(worker, target.role, version) for worker in workers]
        return [self._load_training(worker, rank, len(workers)) for rank, worker in enumerate(workers)]

    async def _load_serving(self, worker: Worker, role: Role, version: int) -> None:
        worker.check()
        name = SERVES[role]
        version = version if name == POLICY else 0
        segment = self.store.acquire(name, version, worker.device)
        await worker.ask(
            "load_serving", [segment], how=self.generation[role].to_json(), version=version,
            segment=segment.number, layout=self.store.layout(name),
        )  # fmt: skip

    async def _load_training(self, worker: Worker, rank: int, ranks: int) -> None:
        """A rank copies the state, so it reads the store only while it loads."""
        worker.check()
        version = self.store.newest(STATE)
        segment = self.store.acquire(STATE, version, worker.device)
        reference = self.store.acquire(REFERENCE, 0, worker.device)
        await worker.ask(
            "load_training", [segment, reference], how=self._learning.to_json(), rank=rank, ranks=ranks,
            version=version, segment=segment.number, layout=self.store.layout(STATE),
            reference=reference.number, reference_layout=self.store.layout(REFERENCE),
        )  # fmt: skip
        self.store.release(worker.device)

    def _bytes(self, target: Placement) -> int:
        """What each device of a target reads from the store."""
        return 4 * floats(self.store.layout(STATE if target.role is Role.TRAIN else SERVES[target.role]))

    # ------------------------------------------------------------------------------- leases

    def serving(self, lease: Lease) -> LiveReplica:
        (device,) = lease.placement.devices
        return LiveReplica(self.cluster.workers[device], self.store)

    def training(self, lease: Lease) -> LiveTrainer:
        return LiveTrainer(self._workers(lease.placement), self.store, self.cluster.limits)

    # ------------------------------------------------------------------------------- the end of workers

    async def restart(self, device: int) -> None:
        self.store.release(device)
        await self.cluster.restart(device)

    def lose(self, device: int) -> None:
        self.cluster.workers[device].kill()

    def close(self) -> None:
        """The last published weights stay readable; processes and shared memory are gone."""
        if not self._last:
            self._last = {name: tensor.clone() for name, tensor in self.store.state(POLICY).items()}
            self.cluster.close()
            self.store.close()

    def weights(self) -> Mapping[str, Tensor]:
        """What was published last, under standard names."""
        return self._last or self.store.state(POLICY)

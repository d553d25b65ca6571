"""The simulated cluster: replicas, a training unit and shifts under a cost model and virtual time.

With a `LengthSource` that generates real text and a `Learner` that computes real gradients the same
class is the co-simulated backend.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from systems.backends.sim.host_cache import HostCache
from systems.backends.sim.lengths import LengthSource
from systems.backends.sim.lifeline import Lifeline
from systems.backends.sim.serving import SimReplica
from systems.backends.sim.training import Learner, SimTrainer
from systems.costs.durations import ClusterDurations
from systems.types import Kind, Lease, PhaseDone, Role, Shift, Step


def _copying(step: Step, shift: Shift) -> tuple[int, ...]:
    """Devices of the placements that move bytes: training state is parked, a target's parameters loaded."""
    parked = tuple(source for source in shift.sources if source.role is Role.TRAIN)
    placements = parked if step is Step.PARK else shift.targets
    return tuple(device for placement in placements for device in placement.devices)


class SimBackend:
    """A cluster whose durations come from `cost`, lengths from `lengths` and gradients from `learner`."""

    def __init__(
        self, kind: Kind, cost: ClusterDurations, lengths: LengthSource, learner: Learner, devices: int
    ) -> None:
        self.kind = kind
        self._host = HostCache(cost.host_cache_bytes(devices))
        self.cost = cost
        self._lengths = lengths
        self._learner = learner
        self._slow: dict[int, float] = {}
        self._owner: dict[int, SimReplica | SimTrainer | Lifeline] = {}  # what runs on a device now
        self._copying: dict[int, None] = {}  # devices that move bytes over their node's host memory

    async def prepare(self) -> None:
        """Simulated devices are there."""

    def start(self) -> None:
        asyncio.get_running_loop()

    async def shift(self, shift: Shift, version: int) -> AsyncIterator[PhaseDone]:
        life = Lifeline(shift.devices)
        for device in shift.devices:
            self._owner[device] = life
        for step in (Step.PARK, Step.RELEASE, Step.LOAD, Step.WARM, Step.READY):
            yield PhaseDone(step, await self._phase(step, shift, life))

    async def _phase(self, step: Step, shift: Shift, life: Lifeline) -> int:
        """Bytes moved by a device: first what the phase takes without them, then the copy."""
        seconds, moved = self.cost.phase(step, shift)
        if seconds:
            await life.sleep(seconds * self._slowdown(shift.devices))
        if moved:
            await self._copy(moved, _copying(step, shift), life)
        return moved

    async def _copy(self, moved: int, devices: tuple[int, ...], life: Lifeline) -> None:
        """At the rate that it begins with, among all that copy at that moment in its most crowded node."""
        self._copying.update(dict.fromkeys(devices))
        try:
            await asyncio.sleep(0)  # who else begins now
            nodes = Counter(device // self.cost.gpus_per_node for device in self._copying)
            sharing = max(nodes[device // self.cost.gpus_per_node] for device in devices)
            await life.sleep(self.cost.copy_s(moved, sharing) * self._slowdown(devices))
        finally:
            for device in devices:
                del self._copying[device]

    def serving(self, lease: Lease) -> SimReplica:
        devices = lease.placement.devices
        replica = SimReplica(
            self.cost.serving[lease.role], self._lengths, lease.version, devices,
            self.cost.update_s(), self._slowdown, self._host, self._copy_s,
        )  # fmt: skip
        self._owner.update(dict.fromkeys(devices, replica))
        return replica

    def _copy_s(self, moved: float) -> float:
        """Seconds to bring a device's part of KV caches to host memory or back; its whole node copies."""
        return self.cost.copy_s(moved, self.cost.gpus_per_node) if moved else 0.0

    def training(self, lease: Lease) -> SimTrainer:
        devices = lease.placement.devices
        trainer = SimTrainer(self.cost, self._learner, devices, self._slowdown)
        self._owner.update(dict.fromkeys(devices, trainer))
        return trainer

    async def restart(self, device: int) -> None:
        await asyncio.sleep(self.cost.restart_s)

    def lose(self, device: int) -> None:
        owner = self._owner.get(device)
        if isinstance(owner, Lifeline):
            owner.end(f"device {device} was lost during a shift")
        elif owner is not None:
            owner.lose(f"device {device} was lost")

    def slow(self, device: int, factor: float) -> None:
        """From now on everything on this device takes `factor` times as long (fault injection)."""
        self._slow[device] = factor

    def _slowdown(self, devices: tuple[int, ...]) -> float:
        return max(self._slow.get(device, 1.0) for device in devices) if self._slow else 1.0

    def close(self) -> None:
        pass

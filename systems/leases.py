"""Who owns which device: the live leases, and the devices that were lost and are not back.

| task    | consumes        | waits for   | unblocked by       |
|---------|-----------------|-------------|--------------------|
| restart | one lost device | the backend | the device is back |

Invariants
* A lease is in `live` from its grant until it is released or lost. Epochs only grow.
* Every step of a lease is logged when it is taken.
* A device in `down` belongs to nobody: its lease has ended, or ends in this very moment.
"""

from __future__ import annotations

from systems import lifecycle
from systems.backends.base import Backend, WorkerLost
from systems.events import DeviceBack, DeviceLost, EventSink, LeaseMoved
from systems.loop.clock import now_ns
from systems.loop.tasks import Tasks
from systems.turn import Turn
from systems.types import Lease, LeaseState, Placement, Role


class Leases:
    """Grants and ends leases, and brings lost devices back."""

    def __init__(self, backend: Backend, log: EventSink, tasks: Tasks, turn: Turn) -> None:
        self.live: dict[int, Lease] = {}  # by epoch
        self.down: dict[int, None] = {}
        self._backend = backend
        self._log = log
        self._tasks = tasks
        self._turn = turn
        self._epochs = 0

    def grant(self, placement: Placement, version: int) -> Lease:
        """A new lease that loads; a rollout replica loads `version`."""
        lease = Lease(placement, self._epochs, version=version if placement.role is Role.ROLLOUT else -1)
        self._epochs += 1
        self.live[lease.epoch] = lease
        self._write(lease)
        return lease

    def move(self, lease: Lease, state: LeaseState) -> None:
        lifecycle.move_lease(lease, state)
        self._write(lease)
        if state in (LeaseState.RELEASED, LeaseState.LOST):
            del self.live[lease.epoch]

    def take_down(self, lost: WorkerLost) -> None:
        """Devices whose workers are gone: they restart, and the policy learns of it."""
        for device in lost.devices:
            if device not in self.down:
                self.down[device] = None
                self._backend.lose(device)
                self._log.emit(DeviceLost(t_ns=now_ns(), device=device, why=str(lost)))
                self._tasks.start(self._restart(device))

    async def _restart(self, device: int) -> None:
        await self._backend.restart(device)
        del self.down[device]
        self._log.emit(DeviceBack(t_ns=now_ns(), device=device))
        self._turn.now()

    def _write(self, lease: Lease) -> None:
        self._log.emit(
            LeaseMoved(
                t_ns=now_ns(), lease=lease.epoch, role=lease.role, state=lease.state,
                devices=lease.placement.devices,
            )
        )  # fmt: skip

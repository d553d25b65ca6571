"""The resource-shiftable runtime: asks the policy, carries shifts out, owns leases, logs every edge.

| task      | consumes        | waits for              | unblocked by                                |
|-----------|-----------------|------------------------|---------------------------------------------|
| govern    | views           | `_wake`                | any change of rates, or a plan's `revisit_ns` |
| carry out | one shift       | its sources to drain   | aborts, ends, the end of a training step      |
| restart   | one lost device | the backend            | the device is back                            |

(`serving.py` has the tasks of replicas and sequences.)

Invariants
* Policies say what should be; only `reconcile` decides which shifts that takes.
* A device has one owner: a lease, or the shift under way. Checked after every shift.
* The policy's memory is the policy's value; the runtime only keeps it.
* Nothing here knows which system runs, what a sequence says, or whether time is real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from systems import lifecycle
from systems.backends.base import Backend, TrainingWorker, WorkerLost
from systems.clock import now_ns
from systems.reconcile import reconcile
from systems.serving import Deadlines, Serving
from systems.staleness import Admission
from systems.types import (
    NS_PER_S,
    SERVING,
    Estimates,
    EventSink,
    Layout,
    Lease,
    LeaseState,
    Placement,
    Plan,
    Policy,
    Recipe,
    ReplicaView,
    Role,
    Shift,
    Step,
    Training,
    View,
)

SMOOTHING = 0.2  # weight of the newest observation in moving averages (source: artifact-template)
WAKES_PER_BATCH = 8  # a policy is woken whenever a role's outstanding work crosses 1/8 of a batch


class Runtime:
    """One cluster under one policy. Use as an async context manager around the pipeline. The backend is
    prepared before and closed afterwards by whoever made it."""

    def __init__(
        self, layout: Layout, recipe: Recipe, policy: Policy[Any], backend: Backend, log: EventSink,
        prior: Estimates, admission: Admission, deadlines: Deadlines | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.recipe = recipe
        self.log = log
        self.estimates = prior
        self.admission = admission
        self.deadlines = deadlines or Deadlines()
        self.serving = Serving(
            backend, log, recipe.publishing, self.deadlines, lambda: self.estimates,
            self._spawn, self.changed, self._lost,
        )  # fmt: skip
        self._policy = policy
        self._memory = policy.begin(layout)
        self._backend = backend
        self._desired = Plan(())
        self._leases: dict[int, Lease] = {}  # live ones, by epoch
        self._trainer: TrainingWorker | None = None
        self._training_since: int | None = None
        self._train_idle = asyncio.Event()
        self._train_ready = asyncio.Event()
        self._shifting: dict[int, int] = {}  # device -> the shift that holds it
        self._down: dict[int, None] = {}  # devices that were lost and are not back
        self._epochs = 0
        self._shifts = 0
        self._seen: tuple[object, ...] = ()
        self._grain = max(1, recipe.prompts * recipe.samples // WAKES_PER_BATCH)
        self._wake = asyncio.Event()
        self._revisit: asyncio.TimerHandle | None = None
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def __aenter__(self) -> Runtime:
        await self._group.__aenter__()
        self._train_idle.set()
        self._backend.start()
        self._spawn(self._govern())
        self._wake.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, error, trace)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    # ------------------------------------------------------------------------------- governing

    def changed(self) -> None:
        """Something happened: wake the policy if it changed rates, not for every sequence."""
        serving, grain = self.serving, self._grain
        rollouts, judgements = serving.outstanding(Role.ROLLOUT), serving.outstanding(Role.REWARD)
        seen = (
            serving.version, self._training_since, self.admission.batch_ready(), serving.idle_replicas,
            -(-rollouts // grain), -(-judgements // grain),
        )  # fmt: skip
        if seen != self._seen:
            self._seen = seen
            self._wake.set()

    async def _govern(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # everything that happens at this moment is seen at once
            view = self.view()
            before = self._memory
            plan, self._memory = self._policy.plan(view, before)
            if plan.placements != self._desired.placements:
                self.log.emit(
                    "decision", view.now_ns, why=plan.why, how=plan.how,
                    placements=[[p.role, list(p.devices)] for p in plan.placements],
                    memory=asdict(before), view=view.record(),
                )  # fmt: skip
            self._desired = plan
            self._apply()
            if self._revisit is not None:
                self._revisit.cancel()
            if plan.revisit_ns is not None:
                loop = asyncio.get_running_loop()
                self._revisit = loop.call_at(plan.revisit_ns / NS_PER_S, self._wake.set)

    def _apply(self) -> None:
        """Start the shifts that lead to the desired plan and can start now."""
        current = [lease.placement for lease in self._leases.values()]
        for shift in reconcile(
            current, self._desired, busy=self._shifting, down=self._down, first_id=self._shifts
        ):
            self._shifts = shift.id + 1
            self._shifting.update(dict.fromkeys(shift.devices, shift.id))
            self._spawn(self._carry_out(shift))

    def view(self) -> View:
        """An immutable picture of this moment."""
        serving, admission = self.serving, self.admission
        loads = {e: serving.load(lease) for e, lease in self._leases.items() if serving.holds(lease)}
        return View(
            now_ns=now_ns(),
            layout=self.layout,
            recipe=self.recipe,
            replicas=tuple(
                ReplicaView(
                    epoch=epoch,
                    placement=lease.placement,
                    state=lease.state,
                    running=len(lease.running),
                    kv_tokens=round(loads[epoch].kv_tokens) if epoch in loads else 0,
                    version=lease.version,
                )
                for epoch, lease in self._leases.items()
            ),
            down=tuple(sorted(self._down)),
            shifting=tuple(sorted(self._shifting)),
            waiting={role: len(serving.waiting[role]) for role in SERVING},
            running={role: serving.running(role) for role in SERVING},
            coming=admission.coming(),
            training=Training(
                version=serving.version,
                started_ns=self._training_since,
                batch_ready=admission.batch_ready(),
            ),
            estimates=self.estimates,
        )

    def describe(self) -> str:
        """Where the run stands, in one line: what an error about it should say."""
        return f"{self.view().describe()}; shifting {sorted(self._shifting)}; down {sorted(self._down)}"

    def observe(self, **known: Any) -> None:
        """Replace estimates by what was measured or counted."""
        self.estimates = replace(self.estimates, **known)

    # ------------------------------------------------------------------------------- shifting

    async def _carry_out(self, shift: Shift) -> None:
        """One shift from draining its sources to its targets being ready, or to a clean failure."""
        began = now_ns()
        self.log.emit(
            "shift.began", began, shift=shift.id, how=shift.how,
            sources=[[p.role, list(p.devices)] for p in shift.sources],
            targets=[[p.role, list(p.devices)] for p in shift.targets],
        )  # fmt: skip
        sources = [lease for lease in self._leases.values() if lease.placement in shift.sources]
        targets: list[Lease] = []
        fault: WorkerLost | None = None
        try:
            if any(device in self._down for device in shift.devices):
                raise WorkerLost((), "a device was lost before the shift began")
            await self._drain(shift, sources)
            drained, version = now_ns(), self.serving.version
            async with asyncio.timeout(self.deadlines.reply_s):
                async for done in self._backend.shift(shift, version):
                    self._phase(shift, done.step, done.bytes_moved)
                    if done.step is Step.RELEASE:
                        self._release(sources)
                        targets = [self._lease(placement, version) for placement in shift.targets]
        except WorkerLost as lost:
            fault = lost
        except TimeoutError:
            fault = WorkerLost(shift.devices, f"shift {shift.id} did not end in time")
        for device in shift.devices:
            del self._shifting[device]
        if fault is None:
            for lease in targets:
                self._activate(lease)
            if shift.sources:
                took = (now_ns() - drained) / NS_PER_S
                self.observe(shift_s=self.estimates.shift_s + SMOOTHING * (took - self.estimates.shift_s))
        else:
            self._clean_up(sources, targets)
            self._take_down(fault)
        self.log.emit("shift.ended", now_ns(), shift=shift.id, ok=fault is None)
        lifecycle.check_owners(self._leases.values())
        self._wake.set()

    async def _drain(self, shift: Shift, sources: Sequence[Lease]) -> None:
        """Empty all sources; only then report that one of them died while it drained."""
        for lease in sources:
            self._move(lease, LeaseState.DRAINING)
        drains = (self._drain_one(lease, shift) for lease in sources)
        for fault in await asyncio.gather(*drains, return_exceptions=True):
            if fault is not None:
                raise fault
        self._phase(shift, Step.DRAIN)

    async def _drain_one(self, lease: Lease, shift: Shift) -> None:
        if lease.role is Role.TRAIN:
            self._train_ready.clear()
            await self._train_idle.wait()
            if lease.state is LeaseState.LOST:
                raise WorkerLost((), "the training unit was lost while it drained")
        else:
            await self.serving.drain(lease, shift.how)

    def _release(self, leases: Sequence[Lease]) -> None:
        """Drained leases end; those that were lost while they drained have ended already."""
        for lease in leases:
            if lease.epoch in self._leases:
                self._end(lease, LeaseState.RELEASED)

    def _clean_up(self, sources: Sequence[Lease], targets: Sequence[Lease]) -> None:
        """A shift failed: what has drained is free, what still holds sequences is given up."""
        for lease in sources:
            if lease.epoch not in self._leases or lease.state is not LeaseState.DRAINING:
                continue
            if lease.running:
                self._end(lease, LeaseState.LOST)
                self._take_down(WorkerLost(lease.placement.devices, "did not drain"))
            else:
                self._end(lease, LeaseState.RELEASED)
        for lease in targets:
            self._move(lease, LeaseState.LOST)

    def _lease(self, placement: Placement, version: int) -> Lease:
        lease = Lease(placement, self._epochs)
        if placement.role is Role.ROLLOUT:
            lease.version = version
        self._epochs += 1
        self._leases[lease.epoch] = lease
        self._log_lease(lease)
        return lease

    def _activate(self, lease: Lease) -> None:
        self._move(lease, LeaseState.ACTIVE)
        if lease.role is Role.TRAIN:
            self._trainer = self._backend.training(lease)
            self._train_ready.set()
        else:
            self.serving.attach(lease)

    def _move(self, lease: Lease, state: LeaseState) -> None:
        lifecycle.move_lease(lease, state)
        self._log_lease(lease)
        if state in (LeaseState.RELEASED, LeaseState.LOST):
            del self._leases[lease.epoch]

    def _end(self, lease: Lease, state: LeaseState) -> None:
        """A lease that was active ends, and its worker with it."""
        self._move(lease, state)
        if lease.role is not Role.TRAIN:
            self.serving.detach(lease)
        elif self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            self._train_ready.clear()

    def _log_lease(self, lease: Lease) -> None:
        self.log.emit(
            "lease", now_ns(), lease=lease.epoch, role=lease.role, state=lease.state,
            devices=list(lease.placement.devices),
        )  # fmt: skip

    def _phase(self, shift: Shift, step: Step, bytes_moved: int = 0) -> None:
        self.log.emit("shift.phase", now_ns(), shift=shift.id, phase=step, bytes=bytes_moved)

    # ------------------------------------------------------------------------------- losses

    def _lost(self, lease: Lease, lost: WorkerLost) -> None:
        """A worker is gone: its lease ends, its sequences wait again, its devices restart."""
        if lease.epoch not in self._leases:
            return
        self._end(lease, LeaseState.LOST)
        self._take_down(lost)
        self._wake.set()

    def _take_down(self, lost: WorkerLost) -> None:
        for device in lost.devices:
            if device not in self._down:
                self._down[device] = None
                self._backend.lose(device)
                self.log.emit("device.lost", now_ns(), device=device, why=str(lost))
                self._spawn(self._restart(device))

    async def _restart(self, device: int) -> None:
        await self._backend.restart(device)
        del self._down[device]
        self.log.emit("device.back", now_ns(), device=device)
        self._wake.set()

    # ------------------------------------------------------------------------------- training

    @contextlib.asynccontextmanager
    async def training_unit(self) -> AsyncIterator[tuple[TrainingWorker, Lease]]:
        """The training unit once it is there; it will not be shifted away until this block ends."""
        while self._trainer is None or not self._train_ready.is_set():
            await self._train_ready.wait()
        trainer = self._trainer
        lease = next(lease for lease in self._leases.values() if lease.role is Role.TRAIN)
        self._training_since = now_ns()
        self._train_idle.clear()
        self.changed()
        try:
            yield trainer, lease
        except WorkerLost as lost:
            self._lost(lease, WorkerLost(lost.devices or lease.placement.devices, str(lost)))
            raise
        finally:
            self._training_since = None
            self._train_idle.set()
            self.changed()

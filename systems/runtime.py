"""The resource-shiftable runtime: asks the policy what should be, and carries out the shifts that lead there.

| task      | consumes  | waits for            | unblocked by                                  |
|-----------|-----------|----------------------|-----------------------------------------------|
| govern    | views     | `turn`               | any change of rates, or a plan's `revisit_ns` |
| carry out | one shift | its sources to drain | aborts, ends, the end of a training step      |
| watch     | progress  | too long a silence   | time                                          |

(`serving.py` has the tasks of replicas and sequences, `leases.py` those of lost devices.)

Invariants
* Policies say what should be; only `reconcile` decides which shifts that takes.
* A device has one owner: a lease, or the shift under way. Checked after every shift.
* The policy's memory is the policy's value; the runtime only keeps it.
* Nothing here knows which system runs, what a sequence says, or whether time is real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from systems import lifecycle, plans
from systems.backends.base import Backend, TrainingWorker, WorkerLost
from systems.estimates.estimator import Estimator
from systems.events import (
    Decision,
    EventSink,
    ShiftBegan,
    ShiftEnded,
    ShiftPhase,
)
from systems.leases import Leases
from systems.loop.clock import now_ns
from systems.loop.tasks import Tasks
from systems.loop.watchdog import Watchdog
from systems.reconcile import reconcile
from systems.serving import Deadlines, Serving
from systems.staleness import Admission
from systems.turn import Turn
from systems.types import (
    NS_PER_S,
    SERVING,
    Layout,
    Lease,
    LeaseState,
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


class Runtime:
    """One cluster under one policy. Use as an async context manager around the pipeline. The backend is
    prepared before and closed afterwards by whoever made it."""

    def __init__(
        self, layout: Layout, recipe: Recipe, policy: Policy[Any], backend: Backend, log: EventSink,
        admission: Admission, estimator: Estimator, deadlines: Deadlines | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.recipe = recipe
        self.log = log
        self.admission = admission
        self.estimator = estimator
        self.deadlines = deadlines or Deadlines()
        self._tasks = Tasks()
        self.turn = Turn(recipe, admission)
        self._demand = self.turn.demand
        self._leases = Leases(backend, log, self._tasks, self.turn)
        self.watchdog = Watchdog()
        self.serving = Serving(
            backend, log, recipe, self.deadlines, estimator, self._tasks, self.turn, self._leases,
            self.watchdog,
        )  # fmt: skip
        self._policy = policy
        self._memory = plans.begin(policy, layout)
        self._backend = backend
        self._desired = Plan(())
        self._trainer: TrainingWorker | None = None
        self._train_idle = asyncio.Event()
        self._train_ready = asyncio.Event()
        self._shifting: dict[int, int] = {}  # device -> the shift that holds it
        self._shifts = 0
        self._revisit: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Runtime:
        await self._tasks.__aenter__()
        self._train_idle.set()
        self._backend.start()
        self._tasks.start(self._govern())
        self._tasks.start(self.watchdog.watch(self._patience_s, self.describe))
        self.turn.now()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.serving.close()
        await self._tasks.__aexit__(kind, error, trace)

    # ------------------------------------------------------------------------------- governing

    async def _govern(self) -> None:
        while True:
            await self.turn.wait()
            view = self.view()
            before = self._memory
            plan, self._memory = plans.ask(self._policy, view, before)
            if plan.placements != self._desired.placements:
                self.log.emit(
                    Decision(
                        t_ns=view.now_ns, why=plan.why, how=plan.how, placements=plan.placements,
                        memory=asdict(before), view=view.record(),
                    )
                )  # fmt: skip
            self._desired = plan
            self._apply()
            self.turn.had()
            if self._revisit is not None:
                self._revisit.cancel()
            if plan.revisit_ns is not None:
                loop = asyncio.get_running_loop()
                self._revisit = loop.call_at(plan.revisit_ns / NS_PER_S, self.turn.now)

    def _apply(self) -> None:
        """Start the shifts that lead to the desired plan and can start now."""
        current = [lease.placement for lease in self._leases.live.values()]
        for shift in reconcile(
            current, self._desired, busy=self._shifting, down=self._leases.down, first_id=self._shifts
        ):
            self._shifts = shift.id + 1
            self._shifting.update(dict.fromkeys(shift.devices, shift.id))
            self._look_at_trainer()
            self._tasks.start(self._carry_out(shift))

    def view(self) -> View:
        """An immutable picture of this moment."""
        serving, admission = self.serving, self.admission
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
                    kv_tokens=round(serving.kv_tokens(lease)),
                    version=lease.version,
                )
                for epoch, lease in self._leases.live.items()
            ),
            down=tuple(sorted(self._leases.down)),
            shifting=tuple(sorted(self._shifting)),
            waiting={role: len(self._demand.waiting[role]) for role in SERVING},
            running={role: self._demand.running[role] for role in SERVING},
            coming=admission.coming(),
            training=Training(
                version=self._demand.version,
                started_ns=self.turn.training_since,
                batch_ready=admission.batch_ready(),
            ),
            estimates=self.estimator.now,
        )

    def describe(self) -> str:
        """Where the run stands, in one line: what an error about it should say."""
        return (
            f"{self.view().describe()}; shifting {sorted(self._shifting)}; down {sorted(self._leases.down)}"
        )

    def _patience_s(self) -> float:
        return self.deadlines.stalled_s(training=self.turn.training_since is not None)

    # ------------------------------------------------------------------------------- shifting

    async def _carry_out(self, shift: Shift) -> None:
        """One shift from draining its sources to its targets being ready, or to a clean failure."""
        began = ShiftBegan(
            t_ns=now_ns(), shift=shift.id, how=shift.how, sources=shift.sources, targets=shift.targets
        )
        self.log.emit(began)
        sources = [lease for lease in self._leases.live.values() if lease.placement in shift.sources]
        targets: list[Lease] = []
        fault: WorkerLost | None = None
        try:
            if any(device in self._leases.down for device in shift.devices):
                raise WorkerLost((), "a device was lost before the shift began")
            await self._drain(shift, sources)
            drained, version = now_ns(), self._demand.version
            async with asyncio.timeout(self.deadlines.reply_s):
                async for done in self._backend.shift(shift, version):
                    self._phase(shift, done.step, done.bytes_moved)
                    if done.step is Step.RELEASE:
                        self._release(sources)
                        targets = [self._leases.grant(placement, version) for placement in shift.targets]
        except WorkerLost as lost:
            fault = lost
        except TimeoutError:
            fault = WorkerLost(shift.devices, f"shift {shift.id} did not end in time")
        for device in shift.devices:
            del self._shifting[device]
        self._look_at_trainer()
        if fault is None:
            for lease in targets:
                self._activate(lease)
            if shift.sources:
                self.estimator.observe_shift((now_ns() - drained) / NS_PER_S)
        else:
            self._clean_up(sources, targets)
            self._leases.take_down(fault)
        self.log.emit(ShiftEnded(t_ns=now_ns(), shift=shift.id, ok=fault is None))
        lifecycle.check_owners(self._leases.live.values())
        self.turn.now()

    async def _drain(self, shift: Shift, sources: Sequence[Lease]) -> None:
        """Empty all sources; only then report that one of them died while it drained."""
        for lease in sources:
            self._leases.move(lease, LeaseState.DRAINING)
        drains = (self._drain_one(lease, shift) for lease in sources)
        for fault in await asyncio.gather(*drains, return_exceptions=True):
            if fault is not None:
                raise fault
        self._phase(shift, Step.DRAIN)

    async def _drain_one(self, lease: Lease, shift: Shift) -> None:
        if lease.role is Role.TRAIN:
            await self._train_idle.wait()
            if lease.state is LeaseState.LOST:
                raise WorkerLost((), "the training unit was lost while it drained")
        else:
            await self.serving.drain(lease, shift.how)

    def _release(self, leases: Sequence[Lease]) -> None:
        """Drained leases end; those that were lost while they drained have ended already."""
        for lease in leases:
            if lease.epoch in self._leases.live:
                self._end(lease, LeaseState.RELEASED)

    def _clean_up(self, sources: Sequence[Lease], targets: Sequence[Lease]) -> None:
        """A shift failed: what has drained is free, what still holds sequences is given up."""
        for lease in sources:
            if lease.epoch not in self._leases.live or lease.state is not LeaseState.DRAINING:
                continue
            if lease.running:
                self._end(lease, LeaseState.LOST)
                self._leases.take_down(WorkerLost(lease.placement.devices, "did not drain"))
            else:
                self._end(lease, LeaseState.RELEASED)
        for lease in targets:
            self._leases.move(lease, LeaseState.LOST)

    def _activate(self, lease: Lease) -> None:
        self._leases.move(lease, LeaseState.ACTIVE)
        if lease.role is Role.TRAIN:
            self._trainer = self._backend.training(lease)
            self._look_at_trainer()
        else:
            self.serving.attach(lease)

    def _end(self, lease: Lease, state: LeaseState) -> None:
        """A lease that was active ends, and its worker with it."""
        self._leases.move(lease, state)
        if lease.role is not Role.TRAIN:
            self.serving.detach(lease)
        elif self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            self._look_at_trainer()

    def _phase(self, shift: Shift, step: Step, bytes_moved: int = 0) -> None:
        self.log.emit(ShiftPhase(t_ns=now_ns(), shift=shift.id, phase=step, bytes_moved=bytes_moved))

    def _look_at_trainer(self) -> None:
        """May a step begin? Not on a unit that a shift has begun to take away, nor on one that is gone."""
        leases = (lease for lease in self._leases.live.values() if lease.role is Role.TRAIN)
        free = any(
            lease.state is LeaseState.ACTIVE and lease.placement.devices[0] not in self._shifting
            for lease in leases
        )
        if free and self._trainer is not None:
            self._train_ready.set()
        else:
            self._train_ready.clear()

    # ------------------------------------------------------------------------------- losses

    def _lose_trainer(self, lease: Lease, lost: WorkerLost) -> None:
        """The training unit is gone: its lease ends, its devices restart."""
        if lease.epoch in self._leases.live:
            self._end(lease, LeaseState.LOST)
            self._leases.take_down(lost)
            self.turn.now()

    # ------------------------------------------------------------------------------- training

    @contextlib.asynccontextmanager
    async def training_unit(self) -> AsyncIterator[tuple[TrainingWorker, Lease]]:
        """The training unit once it is there; it will not be shifted away until this block ends.

        The policy has a turn before: between two steps the unit may be made larger or smaller, or go.
        """
        await self.turn.offer()
        while self._trainer is None or not self._train_ready.is_set():
            await self._train_ready.wait()
        trainer = self._trainer
        lease = next(lease for lease in self._leases.live.values() if lease.role is Role.TRAIN)
        self.turn.training_since = now_ns()
        self._train_idle.clear()
        self.turn.look()
        try:
            yield trainer, lease
        except WorkerLost as lost:
            self._lose_trainer(lease, WorkerLost(lost.devices or lease.placement.devices, str(lost)))
            raise
        finally:
            self.turn.training_since = None
            self._train_idle.set()
            self.turn.look()

"""Sequences on replicas: queues, dispatch, migration, publishing. The same for rollout and reward.

| task    | consumes            | waits for                        | unblocked by                   |
|---------|---------------------|----------------------------------|--------------------------------|
| watch   | one serving lease   | `silence_s` without a chunk      | time                           |
| update  | one rollout lease   | its sequences to leave           | `publish`                      |

What a worker says is heard at once, by a call: no task waits for it.

Invariants
* A sequence is in one queue or on one lease, and ends exactly once (`lifecycle` raises otherwise).
* A chunk counts only if its lease is live, its epoch matches and its serial is the next one. A gap
  means that an answer was lost: the worker is then given up, because its state is unknown.
* A sequence that leaves a replica keeps its tokens and goes to the front of its queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from systems import lifecycle
from systems.backends.base import (
    Backend,
    Finished,
    ServingWorker,
    TokenChunk,
    Work,
    WorkerLost,
    work_of,
)
from systems.estimates.estimator import Estimator
from systems.events import (
    ChunkDropped,
    EventSink,
    LeaseUpdated,
    LeaseUpdating,
    SequenceFinished,
    SequencesDispatched,
    SequencesRequeued,
)
from systems.leases import Leases
from systems.loop.clock import now_ns, to_ns
from systems.loop.mailbox import Mailbox
from systems.loop.tasks import Tasks
from systems.loop.watchdog import Watchdog
from systems.scheduler import Load, Waiting, assign, rebalance, take_turns
from systems.turn import Turn
from systems.types import (
    SERVING,
    End,
    Handover,
    How,
    Lease,
    LeaseState,
    Publishing,
    Recipe,
    Role,
    Router,
    Sequence,
    SequencePhase,
)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When silence becomes a fault, in seconds."""

    silence_s: float = 120.0  # a replica with work that says nothing is asked whether it lives
    late_s: float = 30.0  # an answer on its way may take this long; far above any real delay
    reply_s: float = 300.0  # any single request; well above the slowest shift that others measured
    train_s: float = 7200.0  # one micro-batch or optimizer step
    sequence_s: float = 21_600.0  # the longest possible sequence in the fullest batch

    def stalled_s(self, training: bool) -> float:
        """After how long without anything done a run is given up: whatever can be silent for a reason has
        either ended by then, or is a fault of its own that has been dealt with."""
        return STALLED_SEQUENCES * self.sequence_s + (self.train_s if training else self.reply_s)


STALLED_SEQUENCES = 3  # a sequence may be interrupted and begun again a few times before it ends
CATCH_UP_S = 0.01  # how often a stream that is behind an abort's answer is looked at


class AnswerLost(WorkerLost):
    """A worker's stream has a gap: what it holds is unknown, so it is given up."""


@dataclass(slots=True)
class _Seat:
    """A lease with its worker and what was heard from it. `idle` and `busy` are opposites while it lives."""

    lease: Lease
    worker: ServingWorker
    heard_ns: int
    received: int = 0
    update: asyncio.Task[None] | None = None
    loading: bool = False  # the update is past its sequences and loads the version
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    busy: asyncio.Event = field(default_factory=asyncio.Event)


class Serving:
    """All serving replicas and the sequences that wait for them or run on them."""

    def __init__(
        self, backend: Backend, log: EventSink, recipe: Recipe, deadlines: Deadlines,
        estimator: Estimator, tasks: Tasks, turn: Turn, leases: Leases, watchdog: Watchdog,
    ) -> None:  # fmt: skip
        self.finished: Mailbox[Sequence] = Mailbox()
        self._backend = backend
        self._log = log
        self._publishing = recipe.publishing
        self._handover = recipe.handover
        self._router = recipe.router
        self._last = dict.fromkeys(SERVING, -1)  # the lease that got the last sequence, for taking turns
        self._deadlines = deadlines
        self._estimator = estimator
        self._tasks = tasks
        self._demand = turn.demand
        self._turn = turn
        self._leases = leases
        self._watchdog = watchdog
        self._loop = asyncio.get_running_loop()
        self._seats: dict[int, _Seat] = {}  # by lease epoch
        self._dispatching = dict.fromkeys(SERVING, False)

    # ------------------------------------------------------------------------------- replicas

    def attach(self, lease: Lease) -> None:
        """An active replica: start listening to it and give it work."""
        seat = _Seat(lease, self._backend.serving(lease), now_ns())
        seat.idle.set()
        self._demand.idle_replicas += 1
        self._seats[lease.epoch] = seat
        seat.worker.listen(partial(self._hear, seat))
        self._tasks.start(self._watch(seat))
        if lease.role is Role.ROLLOUT and lease.version < self._demand.version:
            self._begin_update(seat)  # published while it was loading
        else:
            self._dispatch_soon(lease.role)
            self._tasks.start(self._rebalance(lease.role))

    async def drain(self, lease: Lease, how: How) -> None:
        """Empty a draining replica. Raises `WorkerLost` if it dies meanwhile."""
        seat = self._seats.get(lease.epoch)
        if seat is None:
            raise WorkerLost((), f"lease {lease.epoch} was lost before it drained")
        if seat.update is not None and seat.loading:  # what it loads is about to be given up
            seat.update.cancel()
        if how is How.MIGRATE:
            await self._vacate(seat, list(lease.running), "shift")
        await seat.idle.wait()
        if seat.update is not None:
            await asyncio.wait([seat.update])
        if lease.state is LeaseState.LOST:
            raise WorkerLost((), f"lease {lease.epoch} was lost while it drained")

    def detach(self, lease: Lease) -> None:
        """The lease has ended: whatever still ran there waits again."""
        seat = self._seats.pop(lease.epoch)
        self._demand.idle_replicas -= seat.idle.is_set()
        self._requeue(seat, list(lease.running.values()), "loss")
        seat.worker.close()
        seat.idle.set()
        seat.busy.set()

    def _lose(self, lease: Lease, lost: WorkerLost) -> None:
        """A worker is gone: its lease ends, its sequences wait again, its devices restart."""
        if lease.epoch in self._leases.live:
            self._leases.move(lease, LeaseState.LOST)
            self.detach(lease)
            self._leases.take_down(lost)
            self._turn.now()

    def close(self) -> None:
        """The run is over: nothing that a worker still says is heard."""
        for seat in self._seats.values():
            seat.worker.close()

    def kv_tokens(self, lease: Lease) -> float:
        """Context tokens that a replica holds; 0 for one that is not attached."""
        seat = self._seats.get(lease.epoch)
        return seat.worker.kv_tokens() if seat is not None else 0.0

    def progress(self) -> dict[int, int]:
        """Tokens by sequence that replicas have generated and not streamed yet."""
        known: dict[int, int] = {}
        for seat in self._seats.values():
            known.update(seat.worker.progress())
        return known

    # ------------------------------------------------------------------------------- sequences

    def submit(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._demand.waiting[sequence.role].append(sequence)
            self._dispatch_soon(sequence.role)

    def _dispatch_soon(self, role: Role) -> None:
        """Dispatch once after everything that happens at this moment."""
        if not self._dispatching[role]:
            self._dispatching[role] = True
            self._loop.call_soon(self._dispatch, role)

    def _dispatch(self, role: Role) -> None:
        self._dispatching[role] = False
        queue = self._demand.waiting[role]
        if not queue:
            return
        estimates = self._estimator.now
        speed = estimates.speed[role]
        queued = (Waiting(s.id, s.min_version, s.context_tokens) for s in queue)
        full = speed.max_running + speed.ahead
        loads = [self._load(seat) for seat in self._open(role) if len(seat.lease.running) < full]
        soon = {load.epoch: load for load in self._soon(role)}
        held: list[Sequence] = []
        sent: list[Work] = []
        by_seat: dict[int, list[Work]] = {}
        for sequence_id, epoch in self._placed(role, queued, [*loads, *soon.values()]) if loads else ():
            sequence = queue.popleft()
            if sequence.id != sequence_id:
                raise lifecycle.IllegalTransition(
                    f"sequence {sequence_id} was placed out of turn: {sequence.id} is next in the queue"
                )
            if epoch in soon:
                held.append(sequence)
            else:
                work = self._place(sequence, self._seats[epoch])
                sent.append(work)
                by_seat.setdefault(epoch, []).append(work)
        queue.extendleft(reversed(held))
        for epoch, works in by_seat.items():
            self._seats[epoch].worker.submit(works)
        if sent:
            self._log.emit(
                SequencesDispatched(
                    t_ns=now_ns(), role=role, sequences=[work.id for work in sent],
                    leases=[work.epoch for work in sent],
                    context_tokens=[work.context_tokens for work in sent],
                    resumed_tokens=[work.length for work in sent],
                    cached_tokens=[work.cached_tokens for work in sent],
                )
            )  # fmt: skip
        self._turn.look()

    def _placed(self, role: Role, queued: Iterable[Waiting], loads: list[Load]) -> list[tuple[int, int]]:
        """Which sequence goes where, in queue order."""
        estimates = self._estimator.now
        growth = estimates.length_mean[role] / 2  # on average half of a sequence is still to come
        if self._router is Router.LATENCY:
            return assign(queued, loads, estimates.speed[role], growth)
        placed = take_turns(queued, loads, estimates.speed[role], growth, self._last[role])
        if placed:
            self._last[role] = placed[-1][1]
        return placed

    def _place(self, sequence: Sequence, seat: _Seat) -> Work:
        """From the queue to a replica: what its worker is to be told."""
        version = seat.lease.version
        if self._publishing is Publishing.IN_FLIGHT:
            version = sequence.cached_version  # then a cache may be older than the weights that go on with it
        work = work_of(sequence, seat.lease.epoch, version)
        lifecycle.dispatch(sequence, seat.lease, now_ns())
        self._demand.running[sequence.role] += 1
        if seat.idle.is_set():
            self._demand.idle_replicas -= 1
            seat.heard_ns = now_ns()
            seat.idle.clear()
            seat.busy.set()
        return work

    def _open(self, role: Role) -> Iterator[_Seat]:
        """Replicas that may be given work now, oldest first."""
        for seat in self._seats.values():
            lease = seat.lease
            if lease.role is role and lease.state is LeaseState.ACTIVE and not lease.updating:
                yield seat

    def _soon(self, role: Role) -> Iterator[Load]:
        """Replicas that are just loading a version: what is best placed there waits for it, so that a
        publish spreads all that it interrupted over all replicas, and not over the first to be back."""
        for seat in self._seats.values():
            lease = seat.lease
            if lease.role is role and lease.state is LeaseState.ACTIVE and seat.loading:
                yield self._load(seat)._replace(version=self._demand.version)

    def _load(self, seat: _Seat) -> Load:
        lease = seat.lease
        return Load(lease.epoch, lease.version, len(lease.running), seat.worker.kv_tokens())

    def _hear(self, seat: _Seat, said: TokenChunk | WorkerLost) -> None:
        """A worker says something: a chunk, or that it has died."""
        try:
            if isinstance(said, WorkerLost):
                raise said
            self._take(seat, said)
        except WorkerLost as lost:
            self._lose(seat.lease, lost)

    def _take(self, seat: _Seat, chunk: TokenChunk) -> None:
        """One streamed chunk: count it, or drop it if it is stale or doubled."""
        lease = seat.lease
        if lease.epoch not in self._seats or chunk.epoch != lease.epoch or chunk.serial < seat.received:
            self._log.emit(ChunkDropped(t_ns=now_ns(), sequence=chunk.sequence, lease=chunk.epoch))
            return
        if chunk.serial > seat.received:
            raise AnswerLost(lease.placement.devices, f"answer {seat.received} of its worker was lost")
        seat.received += 1
        seat.heard_ns = now_ns()
        sequence = lease.running.get(chunk.sequence)
        if sequence is None:
            return  # aborted just before
        lifecycle.extend(sequence, chunk.version, chunk.count, chunk.tokens, chunk.logprobs)
        if isinstance(chunk, Finished):
            self._leave(seat, sequence, SequencePhase.DONE, chunk.end)
            self._log.emit(
                SequenceFinished(
                    t_ns=now_ns(), sequence=sequence.id, role=sequence.role, lease=lease.epoch,
                    tokens=sequence.length,
                    oldest_version=sequence.segments[0].version if sequence.segments else -1,
                    segments=len(sequence.segments), end=sequence.end,
                )
            )  # fmt: skip
            self.finished.put(sequence)
            self._watchdog.feed()
            speed = self._estimator.now.speed[lease.role]
            if (
                self._demand.waiting[lease.role]
                and len(lease.running) <= speed.max_running + speed.ahead // 2
            ):
                self._dispatch_soon(lease.role)
            self._turn.look()

    def _leave(self, seat: _Seat, sequence: Sequence, to: SequencePhase, end: End | None = None) -> None:
        lifecycle.leave(sequence, seat.lease, to, end)
        self._demand.running[sequence.role] -= 1
        if not seat.lease.running and seat.lease.epoch in self._seats:
            seat.busy.clear()
            seat.idle.set()
            self._demand.idle_replicas += 1

    async def _watch(self, seat: _Seat) -> None:
        """A replica that has work and stays silent is asked; one that cannot account for it is lost."""
        deadlines, lease = self._deadlines, seat.lease
        silence_ns = to_ns(deadlines.silence_s)
        try:
            while lease.epoch in self._seats:
                await seat.busy.wait()
                await asyncio.sleep(deadlines.silence_s)
                if not lease.running or now_ns() - seat.heard_ns < silence_ns:
                    continue
                async with asyncio.timeout(deadlines.reply_s):
                    sent = await seat.worker.ping()
                if sent > seat.received:
                    await asyncio.sleep(deadlines.late_s)
                if sent > seat.received:
                    raise AnswerLost(lease.placement.devices, f"answer {seat.received} never came")
        except TimeoutError:
            self._lose(lease, WorkerLost(lease.placement.devices, "does not answer"))
        except WorkerLost as lost:
            self._lose(lease, lost)

    # ------------------------------------------------------------------------------- migration

    async def _vacate(self, seat: _Seat, sequences: list[int], why: str) -> None:
        """Abort these on their replica and put them back into the queue, tokens kept."""
        if not sequences:
            return
        keep = self._handover is Handover.COPY and why != "publish"  # no cache outlives its weights
        try:
            async with asyncio.timeout(self._deadlines.reply_s):
                chunks = await seat.worker.abort(sequences, keep)
                await self._catch_up(seat)
        except TimeoutError:
            raise WorkerLost(seat.lease.placement.devices, "did not answer an abort") from None
        leaving = []
        for chunk in chunks:
            sequence = seat.lease.running.get(chunk.sequence)
            if sequence is not None:
                lifecycle.extend(sequence, chunk.version, chunk.count, chunk.tokens, chunk.logprobs)
                lifecycle.keep_cache(sequence, chunk.cached_tokens, seat.lease.version)
                leaving.append(sequence)
        self._requeue(seat, leaving, why)
        self._turn.look()

    async def _catch_up(self, seat: _Seat) -> None:
        """What was streamed before an abort comes before what the abort returned."""
        sent = await seat.worker.ping()
        deadline_ns = now_ns() + to_ns(self._deadlines.late_s)
        while seat.received < sent and seat.lease.epoch in self._seats:
            if now_ns() > deadline_ns:
                raise AnswerLost(seat.lease.placement.devices, f"answer {seat.received} never came")
            await asyncio.sleep(CATCH_UP_S)

    def _requeue(self, seat: _Seat, sequences: list[Sequence], why: str) -> None:
        """These leave their replica and go to the front of their queue, in this order."""
        if not sequences:
            return
        role = seat.lease.role
        for sequence in sequences:
            self._leave(seat, sequence, SequencePhase.WAITING)
        self._demand.waiting[role].extendleft(reversed(sequences))
        self._log.emit(
            SequencesRequeued(
                t_ns=now_ns(), role=role, lease=seat.lease.epoch, why=why,
                sequences=[sequence.id for sequence in sequences],
                tokens=[sequence.length for sequence in sequences],
            )
        )  # fmt: skip
        self._dispatch_soon(role)

    async def _rebalance(self, role: Role) -> None:
        """After a replica has come: take sequences off the fullest ones, where that pays.

        They go back to the queue; dispatch then sends each to where it is served best.
        """
        await asyncio.sleep(0)  # let the waiting ones be dispatched first
        estimates = self._estimator.now
        loads = [self._load(seat) for seat in self._open(role)]
        if self._demand.waiting[role] or not loads or self._router is Router.ROUND_ROBIN:
            return
        remaining = estimates.length_mean[role] / 2
        for move in rebalance(loads, estimates.speed[role], remaining, estimates.reprefill_s[role]):
            seat = self._seats.get(move.source)
            if seat is None or seat.lease.state is not LeaseState.ACTIVE or seat.lease.updating:
                continue
            cheap = sorted(seat.lease.running.values(), key=lambda s: (s.context_tokens, s.id))
            try:
                await self._vacate(seat, [sequence.id for sequence in cheap[: move.count]], "rebalance")
            except WorkerLost as lost:
                self._lose(seat.lease, lost)

    # ------------------------------------------------------------------------------- publishing

    def publish(self, version: int) -> None:
        """A new policy version: every rollout replica loads it, as soon as its sequences allow."""
        self._demand.version = version
        for seat in list(self._open(Role.ROLLOUT)):
            self._begin_update(seat)

    def _begin_update(self, seat: _Seat) -> None:
        if not seat.lease.updating:
            lifecycle.begin_update(seat.lease)
            seat.update = self._tasks.start(self._update(seat))

    async def _update(self, seat: _Seat) -> None:
        lease = seat.lease
        try:
            while lease.version < self._demand.version:
                if self._publishing is Publishing.INTERRUPT:
                    await self._vacate(seat, list(lease.running), "publish")
                keep = self._publishing is Publishing.IN_FLIGHT
                if not keep:
                    await seat.idle.wait()
                if lease.state is not LeaseState.ACTIVE:
                    return  # lost, or about to be given up
                version = self._demand.version  # another one may have come, and the older one may be gone
                self._log.emit(LeaseUpdating(t_ns=now_ns(), lease=lease.epoch, version=version))
                seat.loading = True
                try:
                    async with asyncio.timeout(self._deadlines.reply_s):
                        await seat.worker.update(version, keep)
                    lifecycle.take_over(lease, version)
                finally:
                    seat.loading = False
                    served = LeaseUpdated(t_ns=now_ns(), lease=lease.epoch, version=lease.version)
                    self._log.emit(served)
        except WorkerLost as lost:
            self._lose(lease, lost)
        except TimeoutError:
            self._lose(lease, WorkerLost(lease.placement.devices, "did not load a version in time"))
        finally:
            lifecycle.end_update(lease)
            seat.update = None
            self._dispatch_soon(lease.role)

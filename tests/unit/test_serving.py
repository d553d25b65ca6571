"""Sequences on replicas, one worker's answer at a time: what is taken, dropped, requeued and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from harness.runs.assemble import assemble
from systems import lifecycle
from systems.backends.base import Finished, Hear, TokenChunk, Work, WorkerLost
from systems.estimates.estimator import Estimator
from systems.leases import Leases
from systems.loop.clock import now_ns, run_virtual
from systems.loop.watchdog import Watchdog
from systems.serving import AnswerLost, Deadlines, Serving
from systems.staleness import Admission
from systems.turn import Turn
from systems.types import (
    Estimates,
    Group,
    How,
    Lease,
    LeaseState,
    Placement,
    Prompt,
    Publishing,
    Role,
    Sample,
    Sequence,
    SequencePhase,
)
from tests.conftest import MemoryLog, small_spec

PARTS = assemble(small_spec())
PRIOR: Estimates = PARTS.prior


@dataclass
class Scripted:
    """A worker that says what a test tells it to say."""

    epoch: int
    version: int = 0
    held: list[int] = field(default_factory=list)  # sequences in the order in which they were submitted
    hear: Hear = lambda said: None
    sent: int = 0
    aborted: list[TokenChunk] = field(default_factory=list)  # what the next abort returns
    abort_s: float = 0.0
    update_s: float = 1.0
    silent: bool = False  # answers nothing
    closed: bool = False

    def submit(self, works: Collection[Work]) -> None:
        self.held.extend(work.id for work in works)

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        await self._answer(self.abort_s)
        known = [chunk for chunk in self.aborted if chunk.sequence in sequences]
        return known or [self.chunk(s, 0, serial=-1) for s in self.held if s in sequences]

    def listen(self, hear: Hear) -> None:
        self.hear = hear

    async def update(self, version: int, keep: bool = False) -> None:
        await self._answer(self.update_s)
        self.version = version

    async def ping(self) -> int:
        await self._answer(0.0)
        return self.sent

    async def _answer(self, after_s: float) -> None:
        await asyncio.sleep(1e9 if self.silent else after_s)

    def kv_tokens(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True

    # what a test says

    def chunk(
        self, sequence: int, count: int, form: type[TokenChunk] = TokenChunk, **more: Any
    ) -> TokenChunk:
        more.setdefault("serial", self.sent)
        return form(sequence, more.pop("epoch", self.epoch), self.version, count, **more)

    def say(self, sequence: int, count: int, form: type[TokenChunk] = TokenChunk, **more: Any) -> None:
        chunk = self.chunk(sequence, count, form, **more)
        self.sent += 1
        self.hear(chunk)


class Stage:
    """A `Serving` over scripted workers."""

    def __init__(self, publishing: Publishing = Publishing.INTERRUPT, **deadlines: float) -> None:
        self.log = MemoryLog()
        self.workers: dict[int, Scripted] = {}
        self.leases: dict[int, Lease] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.estimator = Estimator(PRIOR, PARTS.recipe)
        backend: Any = _Backend(self)
        tasks: Any = self
        self.turn = Turn(PARTS.recipe, Admission(PARTS.recipe))
        self.live = Leases(backend, self.log, tasks, self.turn)
        self.serving = Serving(
            backend,
            self.log,
            replace(PARTS.recipe, publishing=publishing),
            Deadlines(**deadlines),
            self.estimator,
            tasks,
            self.turn,
            self.live,
            Watchdog(),
        )

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Devices that were lost, and why."""
        return [(event["device"], event["why"]) for event in self.log.of("device.lost")]

    def replica(self, role: Role = Role.ROLLOUT, version: int = 0) -> Scripted:
        """One more active replica."""
        epoch = len(self.workers)
        lease = self.live.grant(Placement(role, (epoch,)), version)
        self.live.move(lease, LeaseState.ACTIVE)
        self.workers[epoch], self.leases[epoch] = Scripted(epoch, version), lease
        self.serving.attach(lease)
        return self.workers[epoch]

    def submit(self, count: int, first: int = 0, role: Role = Role.ROLLOUT) -> list[Sequence]:
        made = []
        for number in range(first, first + count):
            sample = Sample(number, Group(number, Prompt(100), 0))
            oldest = 0 if role is Role.ROLLOUT else -1
            made.append(Sequence(number, sample, role, sample.group.prompt, number, oldest))
            sample.response = made[-1]
        self.serving.submit(made)
        return made

    def waiting(self, role: Role = Role.ROLLOUT) -> list[int]:
        return [sequence.id for sequence in self.turn.demand.waiting[role]]


class _Backend:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def serving(self, lease: Lease) -> Scripted:
        return self._stage.workers[lease.epoch]

    def lose(self, device: int) -> None: ...

    async def restart(self, device: int) -> None:
        await asyncio.sleep(1e9)


Play = Callable[[Stage], Coroutine[Any, Any, None]]


def play(main: Play, publishing: Publishing = Publishing.INTERRUPT, **deadlines: float) -> Stage:
    """Run a test's play in virtual time, and end what it started."""
    stages: list[Stage] = []

    async def bounded() -> None:
        stage = Stage(publishing, **deadlines)
        stages.append(stage)
        async with asyncio.timeout(1e5):
            await main(stage)
        for task in stage.tasks:
            task.cancel()

    run_virtual(bounded())
    return stages[0]


def test_a_chunk_of_another_lease_is_dropped() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        worker.say(0, 5, epoch=worker.epoch + 7)
        worker.sent = 0  # it was not this lease's
        await asyncio.sleep(1)
        assert sequence.length == 0
        worker.say(0, 3, Finished)
        await asyncio.sleep(1)
        assert (sequence.length, sequence.phase) == (3, SequencePhase.DONE)
        (dropped,) = stage.log.of("chunk.dropped")
        assert (dropped["sequence"], dropped["lease"]) == (0, worker.epoch + 7)

    play(main)


def test_a_doubled_chunk_is_dropped() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        worker.say(0, 5)
        worker.hear(worker.chunk(0, 5, serial=0))
        await asyncio.sleep(1)
        assert sequence.length == 5
        worker.say(0, 2, Finished)
        await asyncio.sleep(1)
        assert (sequence.length, sequence.phase) == (7, SequencePhase.DONE)
        assert len(stage.log.of("chunk.dropped")) == 1

    play(main)


def test_a_gap_gives_the_worker_up_and_nothing_of_it_counts() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        worker.say(0, 5)
        worker.hear(worker.chunk(0, 5, serial=2))
        await asyncio.sleep(1)
        assert sequence.length == 5
        ((epoch, lost),) = stage.losses
        assert epoch == 0
        assert "answer 1 " in lost
        assert sequence.phase is SequencePhase.WAITING
        assert worker.closed

    play(main)


def test_sequences_of_a_lost_replica_wait_in_the_order_in_which_they_ran() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(5)
        await asyncio.sleep(1)
        stage.submit(2, first=5)
        await asyncio.sleep(1)
        worker.hear(WorkerLost((0,), "died"))
        await asyncio.sleep(1)
        assert stage.waiting() == [0, 1, 2, 3, 4, 5, 6]
        (requeued,) = stage.log.of("sequences.requeued")
        assert (requeued["why"], len(requeued["sequences"])) == ("loss", 7)

    play(main)


def test_a_migrated_sequence_goes_before_those_that_wait() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(4)
        await asyncio.sleep(1)
        lease = stage.leases[0]
        lifecycle.move_lease(lease, LeaseState.DRAINING)
        stage.submit(2, first=4)
        await stage.serving.drain(lease, How.MIGRATE)
        assert stage.waiting() == [0, 1, 2, 3, 4, 5]
        assert not lease.running
        assert worker.held == [0, 1, 2, 3]

    play(main)


def test_what_was_streamed_before_an_abort_comes_before_what_it_returns() -> None:
    """The abort's answer overtakes a chunk that is still on its way: both count, in their order."""

    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        late = worker.chunk(0, 2, tokens=(1, 2), logprobs=(-1.0, -1.0))
        worker.sent += 1  # it was sent, and arrives in three seconds
        asyncio.get_running_loop().call_later(3, worker.hear, late)
        worker.aborted = [worker.chunk(0, 3, tokens=(3, 4, 5), logprobs=(-2.0,) * 3, serial=-1)]
        lease = stage.leases[0]
        lifecycle.move_lease(lease, LeaseState.DRAINING)
        began = now_ns()
        await stage.serving.drain(lease, How.MIGRATE)
        assert now_ns() - began >= 3e9
        assert sequence.tokens == [1, 2, 3, 4, 5]
        assert stage.waiting() == [0]

    play(main)


def test_a_publish_waits_for_the_stream_too() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        late = worker.chunk(0, 2, tokens=(1, 2), logprobs=(-1.0, -1.0))
        worker.sent += 1
        asyncio.get_running_loop().call_later(3, worker.hear, late)
        worker.aborted = [worker.chunk(0, 1, tokens=(3,), logprobs=(-2.0,), serial=-1)]
        stage.serving.publish(1)
        await asyncio.sleep(2)
        assert worker.version == 0
        await asyncio.sleep(3)
        assert worker.version == 1
        assert sequence.tokens == [1, 2, 3]
        assert [segment.version for segment in sequence.segments] == [0]

    play(main)


def test_an_answer_that_never_comes_gives_the_worker_up() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(1)
        await asyncio.sleep(1)
        worker.sent += 1  # it says that it sent something, and it does not arrive
        lease = stage.leases[0]
        lifecycle.move_lease(lease, LeaseState.DRAINING)
        began = now_ns()
        with pytest.raises(AnswerLost, match="answer 0 never came"):
            await stage.serving.drain(lease, How.MIGRATE)
        assert 20e9 <= now_ns() - began <= 21e9

    play(main, late_s=20.0)


def test_an_abort_without_an_answer_gives_the_worker_up() -> None:
    async def main(stage: Stage) -> None:
        stage.replica().silent = True
        stage.submit(1)
        await asyncio.sleep(1)
        lease = stage.leases[0]
        lifecycle.move_lease(lease, LeaseState.DRAINING)
        began = now_ns()
        with pytest.raises(WorkerLost, match="did not answer an abort"):
            await stage.serving.drain(lease, How.MIGRATE)
        assert now_ns() - began == 50e9

    play(main, reply_s=50.0)


def test_a_drain_that_lets_sequences_finish_waits_for_all() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(2)
        await asyncio.sleep(1)
        lease = stage.leases[0]
        lifecycle.move_lease(lease, LeaseState.DRAINING)
        drain = asyncio.create_task(stage.serving.drain(lease, How.FINISH))
        worker.say(0, 4, Finished)
        await asyncio.sleep(1)
        assert not drain.done()
        worker.say(1, 4, Finished)
        await asyncio.sleep(1)
        assert drain.done()
        assert stage.log.of("sequences.requeued") == []

    play(main)


# ------------------------------------------------------------------------------- publishing


def test_an_interrupted_sequence_goes_on_under_the_new_version() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        (sequence,) = stage.submit(1)
        await asyncio.sleep(1)
        worker.say(0, 2, tokens=(1, 2), logprobs=(-1.0, -1.0))
        stage.serving.publish(1)
        await asyncio.sleep(5)
        assert worker.held == [0, 0], "given back to the replica, which has the new version"
        worker.say(0, 1, Finished, tokens=(3,), logprobs=(-1.0,))
        await asyncio.sleep(1)
        assert [(s.version, s.start, s.stop) for s in sequence.segments] == [(0, 0, 2), (1, 2, 3)]
        assert stage.leases[0].version == 1

    play(main)


def test_with_draining_a_version_waits_for_its_sequences() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(1)
        await asyncio.sleep(1)
        stage.serving.publish(1)
        await asyncio.sleep(10)
        assert worker.version == 0
        stage.submit(1, first=1)
        await asyncio.sleep(1)
        assert worker.held == [0], "no new work while a version waits"
        worker.say(0, 4, Finished)
        await asyncio.sleep(5)
        assert (worker.version, worker.held) == (1, [0, 1])

    play(main, Publishing.DRAIN)


def test_the_newest_of_two_versions_is_loaded() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(1)
        await asyncio.sleep(1)
        stage.serving.publish(1)
        await asyncio.sleep(0.5)  # it loads version 1
        stage.serving.publish(2)
        await asyncio.sleep(10)
        assert worker.version == stage.leases[0].version == 2
        loaded = [event["version"] for event in stage.log.of("lease.updated")]
        assert loaded == [1, 2]

    play(main)


def test_a_replica_that_was_loading_meanwhile_catches_up_before_it_serves() -> None:
    async def main(stage: Stage) -> None:
        stage.serving.publish(3)
        worker = stage.replica(version=2)
        stage.submit(1)
        await asyncio.sleep(0.5)
        assert worker.held == []
        await asyncio.sleep(5)
        assert (worker.version, worker.held) == (3, [0])

    play(main)


def test_a_judge_loads_no_policy_version() -> None:
    async def main(stage: Stage) -> None:
        stage.serving.publish(3)
        judge = stage.replica(Role.REWARD, version=-1)
        stage.serving.publish(4)
        stage.submit(1, role=Role.REWARD)
        await asyncio.sleep(1)
        assert (judge.version, judge.held) == (-1, [0])

    play(main)


def test_a_version_that_does_not_load_in_time_gives_the_worker_up() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        worker.update_s = 100.0
        stage.serving.publish(1)
        await asyncio.sleep(41)
        ((_, lost),) = stage.losses
        assert "did not load a version in time" in lost
        (updated,) = stage.log.of("lease.updated")
        assert updated["version"] == 0, "a load that failed changed nothing"

    play(main, reply_s=40.0)


# ------------------------------------------------------------------------------- silence


def test_a_silent_replica_is_asked_and_kept_if_it_can_account_for_its_stream() -> None:
    async def main(stage: Stage) -> None:
        stage.replica()
        stage.submit(1)
        await asyncio.sleep(200)
        assert stage.losses == []

    play(main, silence_s=30.0)


def test_a_replica_that_does_not_answer_is_lost() -> None:
    async def main(stage: Stage) -> None:
        stage.replica().silent = True
        stage.submit(1)
        await asyncio.sleep(60)
        ((_, lost),) = stage.losses
        assert "does not answer" in lost
        assert stage.waiting() == [0]

    play(main, silence_s=30.0, reply_s=20.0)


def test_a_replica_without_work_may_be_silent() -> None:
    async def main(stage: Stage) -> None:
        stage.replica().silent = True
        await asyncio.sleep(1000)
        assert stage.losses == []

    play(main, silence_s=30.0, reply_s=20.0)


def test_a_lost_answer_is_noticed_in_the_silence_after_it() -> None:
    async def main(stage: Stage) -> None:
        worker = stage.replica()
        stage.submit(1)
        await asyncio.sleep(1)
        worker.sent += 1
        await asyncio.sleep(100)
        ((_, lost),) = stage.losses
        assert "answer 0 never came" in lost

    play(main, silence_s=30.0, late_s=10.0)


def test_dispatch_leaves_room_for_half_of_what_is_still_to_come() -> None:
    """A cache of 10,000 tokens; each sequence has 100, and is expected to grow by half of 4,000."""

    async def main(stage: Stage) -> None:
        speed = replace(PRIOR.speed[Role.ROLLOUT], kv_capacity_tokens=10_000)
        stage.estimator.now = replace(
            PRIOR, speed={**PRIOR.speed, Role.ROLLOUT: speed},
            length_mean={**PRIOR.length_mean, Role.ROLLOUT: 4000.0},
        )  # fmt: skip
        worker = stage.replica()
        stage.submit(9)
        await asyncio.sleep(1)
        assert len(worker.held) == 4, "4 x (100 + 2,000) fit, 5 do not"
        assert stage.waiting() == [4, 5, 6, 7, 8]

    play(main)


# ------------------------------------------------------------------------------- counting


def test_what_runs_and_waits_is_counted() -> None:
    async def main(stage: Stage) -> None:
        demand = stage.turn.demand
        first = stage.replica()
        second = stage.replica()
        assert demand.idle_replicas == 2
        stage.submit(4)
        await asyncio.sleep(1)
        assert (demand.running[Role.ROLLOUT], demand.idle_replicas) == (4, 0)
        assert len(first.held) == len(second.held) == 2
        for sequence in list(first.held):
            first.say(sequence, 3, Finished)
        await asyncio.sleep(1)
        assert (demand.running[Role.ROLLOUT], demand.idle_replicas) == (2, 1)
        assert demand.outstanding(Role.ROLLOUT) == 2
        second.hear(WorkerLost((1,), "died"))
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        assert demand.idle_replicas == 0, "what the lost one had is now on the other one"
        assert len(first.held) == 4
        assert demand.outstanding(Role.ROLLOUT) == 2

    play(main)

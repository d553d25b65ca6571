"""The contract of `systems/backends/base.py`, checked on every backend."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from harness.runs.assemble import assemble
from systems import lifecycle
from systems.backends.base import Finished, TokenChunk, WorkerLost, work_of
from systems.batching import canonical_batch
from systems.loop.clock import WallClockLoop, now_ns, run_virtual
from systems.loop.mailbox import Mailbox
from systems.pipeline import Workload
from systems.rewards import Outcome
from systems.types import (
    End,
    Group,
    How,
    Lease,
    LeaseState,
    PhaseDone,
    Placement,
    Prompt,
    Role,
    Sample,
    Segment,
    Sequence,
    Shift,
    Step,
)
from tests.conftest import small_spec

TINY = ("workload.prompts=2", "workload.samples=4", "workload.mini_batches=2", "learning.max_new_tokens=40")


class Stage:
    """One backend with what a test needs to drive it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.real = name != "sim"
        self.shifts = itertools.count()
        self.version = 0  # published so far
        self.make()

    def make(self) -> None:
        """A backend that nobody has used."""
        if self.real:
            pytest.importorskip("torch")
            spec = small_spec(model="tiny-dense", steps=2, settings=TINY, backend=self.name, gpus=4)
        else:
            spec = small_spec(steps=2)
        parts = assemble(spec)
        self.backend: Any = parts.backend
        self.workload: Workload = parts.workload
        self.recipe = parts.recipe

    async def shift(self, sources: tuple[Placement, ...], targets: tuple[Placement, ...]) -> list[PhaseDone]:
        shift = Shift(next(self.shifts), sources, targets, How.MIGRATE)
        return [done async for done in self.backend.shift(shift, self.version)]

    async def serving(self, role: Role, device: int, epoch: int = 0) -> Any:
        """A replica as the runtime gets one: its shift, then its lease."""
        placement = Placement(role, (device,))
        await self.shift((), (placement,))
        worker = self.backend.serving(Lease(placement, epoch, LeaseState.ACTIVE, self.version))
        worker.heard = Mailbox()
        worker.listen(worker.heard.put)
        return worker

    async def chunk(self, worker: Any) -> TokenChunk:
        """The next one that the worker tells of."""
        said = await worker.heard.get()
        if isinstance(said, WorkerLost):
            raise said
        return said

    async def training(self, *devices: int) -> Any:
        placement = Placement(Role.TRAIN, devices)
        await self.shift((), (placement,))
        return self.backend.training(Lease(placement, 0, LeaseState.ACTIVE))

    async def interrupted(
        self, worker: Any, sequence: Sequence, whole_s: float, keep: bool = False
    ) -> list[TokenChunk]:
        """Submit a sequence that takes `whole_s`, and abort it on its way: what was generated until then.

        In virtual time that is half-way. A live worker is aborted once it has streamed something; if it was
        faster than the abort, it is asked again.
        """
        while True:
            worker.submit([work_of(sequence, 1)])
            parts: list[TokenChunk] = []
            if self.name == "live":
                parts.append(await self.chunk(worker))
            else:
                await asyncio.sleep(whole_s / 2)
            aborted = await worker.abort([sequence.id, 999_999], keep)
            if aborted:
                return parts + aborted

    def sequence(self, index: int, role: Role = Role.ROLLOUT, prompt: Prompt | None = None) -> Sequence:
        group = Group(index // self.recipe.samples, self.workload.prompt(index // self.recipe.samples), 0)
        sample = Sample(index, group)
        return Sequence(
            index * 2 + (role is Role.REWARD), sample, role, prompt or group.prompt, key=index * 2
        )

    async def until_finished(self, worker: Any, count: int) -> dict[int, list[TokenChunk]]:
        """Chunks by sequence until `count` sequences have ended."""
        chunks: dict[int, list[TokenChunk]] = {}
        ended = 0
        while ended < count:
            chunk = await self.chunk(worker)
            chunks.setdefault(chunk.sequence, []).append(chunk)
            ended += isinstance(chunk, Finished)
        return chunks


Drive = Callable[[Callable[[Stage], Coroutine[Any, Any, Any]]], Any]


async def bounded(stage: Stage, main: Callable[[Stage], Coroutine[Any, Any, Any]]) -> Any:
    async with asyncio.timeout(300 if stage.name == "live" else 1e6):
        return await main(stage)


@pytest.fixture(scope="module")
def live_stage() -> Iterator[tuple[Stage, asyncio.Runner]]:
    """Worker processes take seconds to start, so all tests of this module share them."""
    stage = Stage("live")
    with asyncio.Runner(loop_factory=WallClockLoop) as runner:
        runner.run(stage.backend.prepare())
        try:
            yield stage, runner
        finally:
            stage.backend.close()


@pytest.fixture(params=["sim", "cosim", "live"])
def on_backend(request: pytest.FixtureRequest) -> Drive:
    if request.param == "live":
        stage, runner = request.getfixturevalue("live_stage")
        return lambda main: runner.run(bounded(stage, main))
    virtual = Stage(request.param)

    async def started(main: Callable[[Stage], Coroutine[Any, Any, Any]]) -> Any:
        await virtual.backend.prepare()
        virtual.backend.start()
        return await bounded(virtual, main)

    return lambda main: run_virtual(started(main))


def test_phases_of_a_shift_come_in_order_and_take_time(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        train = Placement(Role.TRAIN, (0, 1))
        targets = (Placement(Role.ROLLOUT, (0,)), Placement(Role.REWARD, (1,)))
        await stage.shift((), (train,))
        for sources, taken in (((train,), targets), (targets, (train,))):
            began = now_ns()
            steps = [done.step for done in await stage.shift(sources, taken)]
            assert steps == [Step.PARK, Step.RELEASE, Step.LOAD, Step.WARM, Step.READY]
            assert now_ns() > began

    on_backend(main)


def test_every_sequence_ends_once_and_serials_count_up(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        worker = await stage.serving(Role.ROLLOUT, 0)
        worker.submit([work_of(stage.sequence(index), 0) for index in range(8)])
        chunks = await stage.until_finished(worker, 8)
        assert sorted(chunks) == [index * 2 for index in range(8)]
        assert all(isinstance(parts[-1], Finished) for parts in chunks.values())
        serials = sorted(chunk.serial for parts in chunks.values() for chunk in parts)
        assert serials == list(range(len(serials)))
        assert await worker.ping() == len(serials)
        assert worker.kv_tokens() == 0
        for parts in chunks.values():
            for chunk in parts:
                assert chunk.count > 0
                assert len(chunk.tokens) == len(chunk.logprobs) == (chunk.count if stage.real else 0)

    on_backend(main)


def test_a_cache_that_is_kept_changes_nothing_but_the_time(on_backend: Drive) -> None:
    """A worker says how much of the cache it has kept; whoever continues has the same tokens either way."""

    async def main(stage: Stage) -> None:
        first = await stage.serving(Role.ROLLOUT, 0, 0)
        first.submit([work_of(stage.sequence(index), 0) for index in range(8)])
        made = await stage.until_finished(first, 8)
        index = max(made, key=lambda sequence: sum(chunk.count for chunk in made[sequence])) // 2
        began = now_ns()
        first.submit([work_of(stage.sequence(index), 0)])
        whole = (await stage.until_finished(first, 1))[index * 2]
        took_s, rest_s = (now_ns() - began) / 1e9, {}
        for epoch, keep in enumerate((False, True), 1):
            worker, sequence = await stage.serving(Role.ROLLOUT, 1, epoch), stage.sequence(index)
            parts = await stage.interrupted(worker, sequence, took_s, keep)
            kept = parts[-1].cached_tokens
            assert (kept > 0) == (keep and stage.name != "live")
            sequence.length = sum(chunk.count for chunk in parts)
            sequence.tokens = [token for chunk in parts for token in chunk.tokens]
            assert kept <= sequence.context_tokens
            lifecycle.keep_cache(sequence, kept, version=stage.version)
            assert work_of(sequence, 9, stage.version + 1).cached_tokens == 0, "of no use to other weights"
            third, began = await stage.serving(Role.ROLLOUT, 2, 2 + epoch), now_ns()
            third.submit([work_of(sequence, 2 + epoch, stage.version)])
            rest = (await stage.until_finished(third, 1))[sequence.id]
            rest_s[keep] = (now_ns() - began) / 1e9
            assert [t for c in parts + rest for t in c.tokens] == [t for c in whole for t in c.tokens]
            assert sum(c.count for c in parts + rest) == sum(c.count for c in whole)
        assert stage.name == "live" or rest_s[True] < rest_s[False]

    on_backend(main)


def test_weights_that_change_in_flight_lose_nothing(on_backend: Drive) -> None:
    """Sequences go on under the new version with what they have; co-simulation keeps no caches for that."""

    async def main(stage: Stage) -> None:
        if stage.name == "cosim":
            return
        worker = await stage.serving(Role.ROLLOUT, 0, 0)
        worker.submit([work_of(stage.sequence(index), 0) for index in range(8)])
        trainer = await stage.training(3)
        groups = [scored_group(stage, index) for index in range(stage.recipe.prompts)]
        batch = canonical_batch(groups, stage.version, stage.recipe)
        await trainer.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                await trainer.accumulate(micro)
            await trainer.step()
        stage.version = await trainer.publish()
        await worker.update(stage.version, keep=True)
        made = await stage.until_finished(worker, 8)
        versions = [[chunk.version for chunk in chunks] for chunks in made.values()]
        assert all(listed == sorted(listed) for listed in versions)
        assert {version for listed in versions for version in listed} <= {stage.version - 1, stage.version}
        assert stage.name != "sim" or any(len(set(listed)) == 2 for listed in versions)
        for number, chunks in made.items():
            assert sum(isinstance(chunk, Finished) for chunk in chunks) == 1, number

    on_backend(main)


def test_abort_returns_tokens_and_another_worker_continues(on_backend: Drive) -> None:
    """A sequence aborted half-way and continued elsewhere has the same tokens as an undisturbed one."""

    async def main(stage: Stage) -> None:
        first = await stage.serving(Role.ROLLOUT, 0, 0)
        first.submit([work_of(stage.sequence(index), 0) for index in range(8)])
        made = await stage.until_finished(first, 8)
        index = max(made, key=lambda sequence: sum(chunk.count for chunk in made[sequence])) // 2
        began = now_ns()
        first.submit([work_of(stage.sequence(index), 0)])
        whole = (await stage.until_finished(first, 1))[index * 2]
        second = await stage.serving(Role.ROLLOUT, 1, 1)
        sequence = stage.sequence(index)
        parts = await stage.interrupted(second, sequence, (now_ns() - began) / 1e9)
        assert {chunk.sequence for chunk in parts} == {sequence.id}
        assert second.kv_tokens() == 0
        assert 0 < sum(chunk.count for chunk in parts) < sum(chunk.count for chunk in whole)
        sequence.length = sum(chunk.count for chunk in parts)
        sequence.tokens = [token for chunk in parts for token in chunk.tokens]
        third = await stage.serving(Role.ROLLOUT, 2, 2)
        third.submit([work_of(sequence, 2)])
        rest = (await stage.until_finished(third, 1))[sequence.id]
        assert sum(c.count for c in parts + rest) == sum(c.count for c in whole)
        assert [t for c in parts + rest for t in c.tokens] == [t for c in whole for t in c.tokens]
        assert [p for c in parts + rest for p in c.logprobs] == [p for c in whole for p in c.logprobs]

    on_backend(main)


def test_a_lost_worker_raises_everywhere(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        worker = await stage.serving(Role.ROLLOUT, 3)
        # one alone may be done before the news of the loss
        worker.submit([work_of(stage.sequence(index), 0) for index in range(8)])
        asyncio.get_running_loop().call_soon(stage.backend.lose, 3)
        with pytest.raises(WorkerLost) as lost:
            await stage.until_finished(worker, 8)
        assert lost.value.devices == (3,)
        for request in (worker.ping(), worker.abort([0]), worker.update(1)):
            with pytest.raises(WorkerLost):
                await request
        began = now_ns()
        await stage.backend.restart(3)
        assert now_ns() > began

    on_backend(main)


def test_a_device_lost_during_a_shift_ends_it(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        asyncio.get_running_loop().call_soon(stage.backend.lose, 0)
        with pytest.raises(WorkerLost) as lost:
            await stage.shift((), (Placement(Role.ROLLOUT, (0,)),))
        assert lost.value.devices == (0,)
        await stage.backend.restart(0)

    on_backend(main)


def scored_group(stage: Stage, index: int) -> Group:
    group = Group(index, stage.workload.prompt(index), 0)
    for number in range(stage.recipe.samples):
        sample = Sample(index * stage.recipe.samples + number, group, reward=float(number % 2))
        sequence = Sequence(sample.id * 2, sample, Role.ROLLOUT, group.prompt, key=0)
        sequence.length, sequence.tokens, sequence.logprobs = 3, [20, 30, 12], [-1.0, -1.0, -1.0]
        sequence.segments = [Segment(0, 0, 3)]
        sample.response = sequence
        group.samples.append(sample)
    return group


def test_training_steps_publish_versions_and_begin_forgets(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        groups = [scored_group(stage, index) for index in range(stage.recipe.prompts)]
        batch = canonical_batch(groups, stage.version, stage.recipe)
        worker = await stage.training(0, 1)
        await worker.begin(batch)
        await worker.accumulate(batch.mini_batches[0][0])  # abandoned: the next begin forgets it
        began = now_ns()
        await worker.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                await worker.accumulate(micro)
            await worker.step()
        stage.version += 1
        assert await worker.publish() == stage.version
        assert now_ns() > began

    on_backend(main)


def test_an_updated_worker_writes_the_new_version(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        groups = [scored_group(stage, index) for index in range(stage.recipe.prompts)]
        batch = canonical_batch(groups, stage.version, stage.recipe)
        trainer = await stage.training(0, 1)
        await trainer.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                await trainer.accumulate(micro)
            await trainer.step()
        worker = await stage.serving(Role.ROLLOUT, 2)
        stage.version = await trainer.publish()
        await worker.update(stage.version)
        worker.submit([work_of(stage.sequence(0), 0)])
        chunks = await stage.until_finished(worker, 1)
        assert {chunk.version for parts in chunks.values() for chunk in parts} == {stage.version}

    on_backend(main)


def test_a_judge_reads_a_response_and_ends(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        writer = await stage.serving(Role.ROLLOUT, 0)
        response = stage.sequence(0)
        writer.submit([work_of(response, 0)])
        chunks = (await stage.until_finished(writer, 1))[0]
        response.length = sum(chunk.count for chunk in chunks)
        response.tokens = [token for chunk in chunks for token in chunk.tokens]
        response.sample.response = response
        judge = await stage.serving(Role.REWARD, 1)
        judgement = stage.sequence(0, Role.REWARD, stage.workload.judge_prompt(response.sample))
        judge.submit([work_of(judgement, 0)])
        parts = (await stage.until_finished(judge, 1))[judgement.id]
        judgement.tokens = [token for chunk in parts for token in chunk.tokens]
        verdict = stage.workload.verdict(judgement)
        real = (Outcome.SCORED, Outcome.UNPARSABLE)
        assert verdict.outcome in (real if stage.real else (Outcome.NOT_REAL,))
        assert {chunks[-1].end, parts[-1].end} <= (set(End) if stage.real else {None})
        assert {chunk.end for chunk in (*chunks[:-1], *parts[:-1])} <= {None}

    on_backend(main)

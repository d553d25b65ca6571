"""The contract of `systems/backends/base.py`, checked on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.build import build
from systems.backends.base import Finished, TokenChunk, WorkerLost, work_of
from systems.batching import canonical_batch
from systems.clock import now_ns, run_virtual
from systems.pipeline import Workload
from systems.types import (
    Group,
    Lease,
    LeaseState,
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
        if name == "cosim":
            pytest.importorskip("torch")
            spec = small_spec(model="tiny-dense", steps=2, settings=TINY)
        else:
            spec = small_spec(steps=2)
        parts = build(spec)
        self.real = name == "cosim"
        self.backend: Any = parts.backend
        self.workload: Workload = parts.workload
        self.recipe = parts.recipe

    def lease(self, role: Role, devices: tuple[int, ...], epoch: int = 0) -> Lease:
        return Lease(Placement(role, devices), epoch, LeaseState.ACTIVE, version=0)

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
        async for chunk in worker.stream():
            chunks.setdefault(chunk.sequence, []).append(chunk)
            ended += isinstance(chunk, Finished)
            if ended == count:
                break
        return chunks


Drive = Callable[[Callable[[Stage], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=["sim", "cosim"])
def on_backend(request: pytest.FixtureRequest) -> Drive:
    stage = Stage(request.param)

    def drive(main: Callable[[Stage], Coroutine[Any, Any, Any]]) -> Any:
        async def bounded() -> Any:
            stage.backend.start()
            async with asyncio.timeout(1e6):
                return await main(stage)

        return run_virtual(bounded())

    return drive


def test_phases_of_a_shift_come_in_order_and_take_time(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        train = Placement(Role.TRAIN, (0, 1))
        targets = (Placement(Role.ROLLOUT, (0,)), Placement(Role.REWARD, (1,)))
        for shift in (Shift(0, (train,), targets, None), Shift(1, targets, (train,), None)):  # type: ignore[arg-type]
            began = now_ns()
            steps = [done.step async for done in stage.backend.shift(shift, 0)]
            assert steps == [Step.PARK, Step.RELEASE, Step.LOAD, Step.WARM, Step.READY]
            assert now_ns() > began

    on_backend(main)


def test_every_sequence_ends_once_and_serials_count_up(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        worker = stage.backend.serving(stage.lease(Role.ROLLOUT, (0,)))
        for index in range(8):
            worker.submit(work_of(stage.sequence(index), epoch=0))
        chunks = await stage.until_finished(worker, 8)
        assert sorted(chunks) == [index * 2 for index in range(8)]
        assert all(isinstance(parts[-1], Finished) for parts in chunks.values())
        serials = sorted(chunk.serial for parts in chunks.values() for chunk in parts)
        assert serials == list(range(len(serials)))
        assert await worker.ping() == len(serials)
        assert worker.load().sequences == 0
        for parts in chunks.values():
            for chunk in parts:
                assert chunk.count > 0
                assert len(chunk.tokens) == len(chunk.logprobs) == (chunk.count if stage.real else 0)

    on_backend(main)


def test_abort_returns_tokens_and_another_worker_continues(on_backend: Drive) -> None:
    """A sequence aborted half-way and continued elsewhere has the same tokens as an undisturbed one."""

    async def main(stage: Stage) -> None:
        first = stage.backend.serving(stage.lease(Role.ROLLOUT, (0,), 0))
        began = now_ns()
        first.submit(work_of(stage.sequence(5), 0))
        whole = (await stage.until_finished(first, 1))[10]
        half_s = (now_ns() - began) / 2e9
        second = stage.backend.serving(stage.lease(Role.ROLLOUT, (1,), 1))
        sequence = stage.sequence(5)
        second.submit(work_of(sequence, 1))
        await asyncio.sleep(half_s)
        parts = await second.abort([sequence.id, 999_999])
        assert [chunk.sequence for chunk in parts] == [sequence.id]
        assert second.load().sequences == 0
        assert 0 < parts[0].count < sum(chunk.count for chunk in whole)
        sequence.length, sequence.tokens = parts[0].count, list(parts[0].tokens)
        third = stage.backend.serving(stage.lease(Role.ROLLOUT, (2,), 2))
        third.submit(work_of(sequence, 2))
        rest = (await stage.until_finished(third, 1))[10]
        assert sum(c.count for c in parts + rest) == sum(c.count for c in whole)
        assert [t for c in parts + rest for t in c.tokens] == [t for c in whole for t in c.tokens]
        assert [p for c in parts + rest for p in c.logprobs] == [p for c in whole for p in c.logprobs]

    on_backend(main)


def test_a_lost_worker_raises_everywhere(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        worker = stage.backend.serving(stage.lease(Role.ROLLOUT, (3,)))
        worker.submit(work_of(stage.sequence(0), 0))
        asyncio.get_running_loop().call_later(0.5, stage.backend.lose, 3)
        with pytest.raises(WorkerLost) as lost:
            await stage.until_finished(worker, 1)
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
        shift = Shift(0, (), (Placement(Role.ROLLOUT, (0,)),), None)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0.5, stage.backend.lose, 0)
        with pytest.raises(WorkerLost):
            _ = [done async for done in stage.backend.shift(shift, 0)]

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
        batch = canonical_batch(groups, 0, stage.recipe)
        worker = stage.backend.training(stage.lease(Role.TRAIN, (0, 1)))
        await worker.begin(batch)
        await worker.accumulate(batch.mini_batches[0][0])  # abandoned: the next begin forgets it
        began = now_ns()
        await worker.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                await worker.accumulate(micro)
            await worker.step()
        assert await worker.publish() == 1
        assert now_ns() > began

    on_backend(main)


def test_an_updated_worker_writes_the_new_version(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        groups = [scored_group(stage, index) for index in range(stage.recipe.prompts)]
        batch = canonical_batch(groups, 0, stage.recipe)
        trainer = stage.backend.training(stage.lease(Role.TRAIN, (0, 1)))
        await trainer.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                await trainer.accumulate(micro)
            await trainer.step()
        await trainer.publish()
        worker = stage.backend.serving(stage.lease(Role.ROLLOUT, (2,)))
        await worker.update(1)
        worker.submit(work_of(stage.sequence(0), 0))
        chunks = await stage.until_finished(worker, 1)
        assert {chunk.version for parts in chunks.values() for chunk in parts} == {1}

    on_backend(main)


def test_a_judge_reads_a_response_and_ends(on_backend: Drive) -> None:
    async def main(stage: Stage) -> None:
        writer = stage.backend.serving(stage.lease(Role.ROLLOUT, (0,)))
        response = stage.sequence(0)
        writer.submit(work_of(response, 0))
        chunks = (await stage.until_finished(writer, 1))[0]
        response.length = sum(chunk.count for chunk in chunks)
        response.tokens = [token for chunk in chunks for token in chunk.tokens]
        response.sample.response = response
        judge = stage.backend.serving(stage.lease(Role.REWARD, (1,)))
        judgement = stage.sequence(0, Role.REWARD, stage.workload.judge_prompt(response.sample))
        judge.submit(work_of(judgement, 0))
        parts = (await stage.until_finished(judge, 1))[judgement.id]
        judgement.tokens = [token for chunk in parts for token in chunk.tokens]
        verdict = stage.workload.verdict(judgement)
        assert verdict in ((0.0, 1.0) if stage.real else (None,))

    on_backend(main)

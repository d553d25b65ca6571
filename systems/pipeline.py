"""One RL pipeline for every system: admit -> rollout -> judge -> batch -> train -> publish.

| loop  | consumes            | waits for                      | unblocked by            |
|-------|---------------------|--------------------------------|-------------------------|
| admit | prompts             | the staleness bound            | a published version     |
| judge | finished sequences  | the next one                   | a serving replica       |
| train | scored groups       | a full batch, a training unit  | `judge`, a shift        |

Which devices do the work, when they change roles and what that costs is not visible from here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from systems import lifecycle
from systems.backends.base import TrainingWorker, WorkerLost
from systems.batching import Batch, canonical_batch
from systems.estimates.estimator import Estimator
from systems.events import (
    BatchAdmitted,
    BatchTaken,
    EventSink,
    SampleScored,
    TrainBegan,
    TrainEnded,
    TrainLost,
    VersionPublished,
)
from systems.loop.clock import now_ns
from systems.rewards import Outcome, Verdict, reward_of
from systems.runtime import Runtime
from systems.staleness import Admission
from systems.types import (
    NS_PER_S,
    Group,
    NotFinite,
    Prompt,
    Recipe,
    Role,
    Sample,
    SamplePhase,
    Sequence,
    SequencePhase,
    TrainStats,
)

T = TypeVar("T")


class Workload(Protocol):
    """What is asked, how it is judged, and what the judge's text is worth."""

    def prompt(self, group: int) -> Prompt:
        """The prompt of a group: the same for every system, whatever happened before."""
        ...

    def judge_prompt(self, sample: Sample) -> Prompt:
        """What the judge reads: it contains the response."""
        ...

    def verdict(self, judgement: Sequence) -> Verdict:
        """What a judgement's text says."""
        ...

    def truth(self, sample: Sample) -> float | None:
        """1 or 0 as the response is right, for the record only; None where that is unknown."""
        ...


class Pipeline:
    """Runs `recipe.steps` RL steps of `workload` on `runtime`."""

    def __init__(
        self, recipe: Recipe, workload: Workload, admission: Admission, estimator: Estimator,
        runtime: Runtime, log: EventSink,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.workload = workload
        self.runtime = runtime
        self.log = log
        self.admission = admission
        self.estimator = estimator
        self.version = 0
        self.finished = False
        self._published = asyncio.Event()
        self._scored = asyncio.Event()

    async def run(self) -> None:
        async with self.runtime, asyncio.TaskGroup() as loops:
            admit = loops.create_task(self.admit())
            judge = loops.create_task(self.judge())
            await self.train()
            self.finished = True
            admit.cancel()
            judge.cancel()

    async def admit(self) -> None:
        for batch in range(self.recipe.steps):
            while not self.admission.admits(batch, self.version):
                self._published.clear()
                await self._published.wait()
            groups = [self._group(batch * self.recipe.prompts + i) for i in range(self.recipe.prompts)]
            ends = (groups[0].id, groups[-1].id)
            self.log.emit(BatchAdmitted(t_ns=now_ns(), batch=batch, version=self.version, groups=ends))
            responses = [sample.response for group in groups for sample in group.samples if sample.response]
            self.runtime.serving.submit(responses)

    async def judge(self) -> None:
        while True:
            sequence = await self.runtime.serving.finished.get()
            if sequence.role is Role.ROLLOUT:
                self._ask_judge(sequence.sample)
            else:
                self._hear_judge(sequence.sample)

    async def train(self) -> None:
        for version in range(self.recipe.steps):
            groups = await self._next_batch(version)
            stats = await self._train_until_published(canonical_batch(groups, version, self.recipe))
            self._publish(groups, stats)

    # ------------------------------------------------------------------------------- admission

    def _group(self, group_id: int) -> Group:
        group = Group(group_id, self.workload.prompt(group_id), self.version)
        for index in range(self.recipe.samples):
            sample = Sample(group_id * self.recipe.samples + index, group)
            lifecycle.begin_sample(sample, self._sequence(sample, 0, Role.ROLLOUT, group.prompt))
        self.admission.admit(group)
        return group

    def _sequence(self, sample: Sample, index: int, role: Role, prompt: Prompt) -> Sequence:
        """The response (index 0) or a judgement of a sample; ids depend on nothing but the sample."""
        sequence_id = sample.id * (1 + self.recipe.judge_calls) + index
        oldest = sample.group.admitted_version if role is Role.ROLLOUT else -1
        return Sequence(sequence_id, sample, role, prompt, key=sequence_id, min_version=oldest)

    # ------------------------------------------------------------------------------- judging

    def _ask_judge(self, sample: Sample) -> None:
        prompt = self.workload.judge_prompt(sample)
        calls = self.recipe.judge_calls
        judgements = [self._sequence(sample, 1 + i, Role.REWARD, prompt) for i in range(calls)]
        lifecycle.begin_judging(sample, judgements)
        self.runtime.serving.submit(judgements)
        if not judgements:  # a rule gives the reward, at once
            self._hear_judge(sample)

    def _hear_judge(self, sample: Sample) -> None:
        """Score a sample once all its judgements are done. Several may end at one moment."""
        done = all(judgement.phase is SequencePhase.DONE for judgement in sample.judgements)
        if sample.phase is not SamplePhase.JUDGING or not done:
            return
        verdicts = [self.workload.verdict(judgement) for judgement in sample.judgements]
        lifecycle.score(sample, reward_of(verdicts), self.workload.truth(sample))
        judged = list(zip(sample.judgements, verdicts, strict=True))
        unparsable = tuple(asked.id for asked, verdict in judged if verdict.outcome is Outcome.UNPARSABLE)
        self.log.emit(
            SampleScored(
                t_ns=now_ns(), sample=sample.id, reward=sample.reward, true_accuracy=sample.true_accuracy,
                unparsable=None if sample.reward is None else unparsable,
            )
        )  # fmt: skip
        if not sample.group.rolling and not sample.group.judging:  # all of them are scored
            self.admission.score(sample.group)
            self.runtime.turn.look()
            self._scored.set()

    # ------------------------------------------------------------------------------- training

    async def _next_batch(self, version: int) -> list[Group]:
        while not self.admission.ready():
            self._scored.clear()
            await self._scored.wait()
        groups = self.admission.take(version)
        for group in groups:
            for sample in group.samples:
                lifecycle.move_sample(sample, SamplePhase.BATCHED)
        self.admission.untrained = len(groups) * self.recipe.samples
        self.log.emit(BatchTaken(t_ns=now_ns(), step=version, groups=tuple(group.id for group in groups)))
        self.estimator.observe_batch(groups, self.admission.under_way(), self.runtime.serving.progress())
        return groups

    async def _train_until_published(self, batch: Batch) -> list[TrainStats]:
        """Train on whatever unit there is; if it is lost, begin the whole step again."""
        samples = self.admission.untrained
        while True:
            try:
                async with self.runtime.training_unit() as (unit, lease):
                    began = now_ns()
                    self.admission.untrained = 0
                    self.runtime.turn.look()
                    self.log.emit(TrainBegan(t_ns=began, step=batch.version, lease=lease.epoch))
                    stats = await self._train_on(unit, batch)
                    self.version = await self._in_time(unit.publish())
                    took_s = (now_ns() - began) / NS_PER_S
                    self.log.emit(TrainEnded(t_ns=now_ns(), step=batch.version, lease=lease.epoch))
                    self.estimator.observe_training(took_s, len(lease.placement.devices))
                    return stats
            except WorkerLost as lost:
                self.admission.untrained = samples
                self.runtime.turn.look()
                self.log.emit(TrainLost(t_ns=now_ns(), step=batch.version, why=str(lost)))

    async def _train_on(self, unit: TrainingWorker, batch: Batch) -> list[TrainStats]:
        stats = []
        await self._in_time(unit.begin(batch))
        for mini_batch in batch.mini_batches:
            for micro_batch in mini_batch:
                await self._in_time(unit.accumulate(micro_batch))
            stats.append(await self._in_time(unit.step()))
            check_finite(batch.version, stats[-1])
        return stats

    async def _in_time(self, request: Awaitable[T]) -> T:
        """A training unit that does not answer is lost like one that died."""
        try:
            async with asyncio.timeout(self.runtime.deadlines.train_s):
                answer = await request
        except TimeoutError:
            raise WorkerLost((), "the training unit does not answer") from None
        self.runtime.watchdog.feed()
        return answer

    def _publish(self, groups: list[Group], stats: list[TrainStats]) -> None:
        for group in groups:
            lifecycle.retire(group)
        learned = tuple(one.values for one in stats)
        self.log.emit(VersionPublished(t_ns=now_ns(), version=self.version, stats=learned))
        self.runtime.turn.look()
        self.runtime.serving.publish(self.version)
        self._published.set()


def check_finite(step: int, stats: TrainStats) -> None:
    """Weights that are not numbers any more would be published, served and trained on without a word."""
    for name, value in stats.values.items():
        if not math.isfinite(value):
            raise NotFinite(f"training diverged in RL step {step + 1}: {name} is {value}")

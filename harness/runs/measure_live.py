"""Measures what a group's real models cost on this machine, with as many workers as there are cores.

All workers work at the same time, as in a run, because two that share a machine are slower than one.

| what     | is measured as                                   | fitted                          |
|----------|--------------------------------------------------|---------------------------------|
| serving  | every step of whole generations                  | two constants and three slopes  |
| training | whole RL steps on what was generated and judged  | a constant and a slope          |
| shifts   | all workers through the roles, again and again   | medians                         |

Each round is also predicted from the others: the errors are those of its total time, mean absolute. On a
shared machine most of that is the machine's own drift from one minute to the next.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from harness.results.record import processor
from harness.runs.assemble import recipe_of
from harness.runs.backends import LIVE
from harness.runs.live_costs import About, Calibration, ControlFit, GroupFit, ServingFit, TrainingFit
from harness.runs.spec import cores, with_gpus
from harness.runs.tiny_models import live
from systems.backends.base import Finished, TokenChunk, WorkerLost, work_of
from systems.backends.live.backend import LiveBackend
from systems.backends.live.serving import LiveReplica
from systems.backends.live.training import LiveTrainer, together
from systems.batching import canonical_batch
from systems.loop.clock import now_ns, run_live
from systems.loop.mailbox import Mailbox
from systems.pipeline import Workload
from systems.rewards import reward_of
from systems.types import Group, How, Lease, LeaseState, Placement, Prompt, Role, Sample, Segment, Shift, Step
from systems.types import Sequence as Generation
from workloads.groups import ModelGroup, load_group

SEED = 1_000_003  # of the workload: not one that anybody runs
# RL steps' worth of work, and how many sequences each decodes together. With few at a time newcomers are
# read in often and a few at a time, as in a run.
TOGETHER = (64, 8, 32, 16, 64, 48, 64, 32)


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of RL work, times through all roles, restarts."""

    rounds: int = len(TOGETHER)
    shifts: int = 20
    restarts: int = 2


QUICK = Effort(rounds=4, shifts=5, restarts=1)
Floats = NDArray[np.float64]


def calibrate(
    models: Sequence[str], workers: int, said: Callable[[str], None], effort: Effort | None = None
) -> Calibration:
    """Measure and fit; `said` is told what is being done. Raises `ClusterUnfit` or `WorkerLost`."""
    effort = effort or Effort()
    groups = {}
    for model in models:
        said(f"{model}: {effort.rounds} RL steps, {effort.shifts} times through the roles")
        group = with_gpus(load_group(model), workers, LIVE, time_shares=True)
        groups[model] = run_live(_Measurement(group, effort).all())
    about = About(
        kind="measured",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        processor=processor(),
        platform=platform.platform(),
        torch=metadata.version("torch"),
        workers=workers,
        cores=cores(),
    )
    return Calibration(about=about, groups=groups)


class _Measurement:
    """One group's workers, and what was measured on them."""

    def __init__(self, group: ModelGroup, effort: Effort) -> None:
        self.effort = effort
        self.backend: LiveBackend
        self.workload: Workload
        self.backend, self.workload, _ = live(group, SEED)
        self.recipe = recipe_of(group, effort.rounds, staleness=0)
        self.devices = tuple(range(group.cluster.gpus))
        self.version = 0
        self.shifts = 0
        self.steps: dict[Role, list[list[list[float]]]] = {Role.ROLLOUT: [], Role.REWARD: []}  # by round
        self.micros: list[list[tuple[float, float]]] = []  # by round: tokens, seconds of a micro-batch
        self.seconds: dict[str, list[float]] = {"optimizer": [], "publish": [], "update": [], "restart": []}
        self.phases: dict[Role, dict[Step, list[float]]] = {role: {} for role in Role}

    async def all(self) -> GroupFit:
        try:
            await self.backend.prepare()
            self.backend.start()
            for number in range(self.effort.rounds):
                await self.round(number)
            for _ in range(self.effort.shifts):
                await self.through_roles()
            for _ in range(self.effort.restarts):
                await self.restart()
        finally:
            self.backend.close()
        return self.fit()

    # ------------------------------------------------------------------------------- measuring

    async def round(self, number: int) -> None:
        """One RL step: generate on all workers at once, judge likewise, train."""
        first = number * self.recipe.prompts
        groups = [self.group(first + index) for index in range(self.recipe.prompts)]
        samples = [sample for group in groups for sample in group.samples]
        responses = [sample.response for sample in samples if sample.response]
        await self.generate(Role.ROLLOUT, responses, TOGETHER[number])
        for sample in samples:
            prompt = self.workload.judge_prompt(sample)
            sample.judgements = [_generation(sample, Role.REWARD, prompt)]
        await self.generate(Role.REWARD, [s.judgements[0] for s in samples], TOGETHER[number])
        for sample in samples:
            sample.reward = reward_of([self.workload.verdict(sample.judgements[0])])
        await self.train(groups)

    def group(self, number: int) -> Group:
        group = Group(number, self.workload.prompt(number), self.version)
        for index in range(self.recipe.samples):
            sample = Sample(number * self.recipe.samples + index, group)
            sample.response = _generation(sample, Role.ROLLOUT, group.prompt)
            group.samples.append(sample)
        return group

    async def generate(self, role: Role, sequences: list[Generation], at_once: int) -> None:
        how = self.backend.generation[role]
        self.backend.generation[role] = replace(how, max_running=at_once)
        replicas = [await self.serving(role, device) for device in self.devices]
        shares = [sequences[index :: len(replicas)] for index in range(len(replicas))]
        await together(replica.time_steps() for replica in replicas)
        await together(map(_generate, replicas, shares))
        times = await together(replica.time_steps() for replica in replicas)
        self.steps[role].append([step for steps in times for step in steps])
        self.backend.generation[role] = how

    async def serving(self, role: Role, device: int) -> LiveReplica:
        placement = Placement(role, (device,))
        await self.shift((), (placement,))
        return self.backend.serving(Lease(placement, 0, LeaseState.ACTIVE, self.version))

    async def train(self, groups: list[Group]) -> None:
        unit = Placement(Role.TRAIN, self.devices)
        await self.shift((), (unit,))
        trainer: LiveTrainer = self.backend.training(Lease(unit, 0, LeaseState.ACTIVE))
        batch = canonical_batch(groups, self.version, self.recipe)
        await trainer.begin(batch)
        micros = []
        for mini in batch.mini_batches:
            for start in range(0, len(mini), len(self.devices)):
                together_now = mini[start : start + len(self.devices)]
                began = now_ns()
                for micro in together_now:
                    await trainer.accumulate(micro)
                await trainer.gradients()
                tokens = sum(micro.total_tokens for micro in together_now) / len(together_now)
                micros.append((tokens, (now_ns() - began) / 1e9))
            await self.timed("optimizer", trainer.step)
        self.micros.append(micros)
        await self.timed("publish", trainer.publish)
        self.version += 1
        trainer.close()
        replica = await self.serving(Role.ROLLOUT, self.devices[0])
        await self.timed("update", lambda: replica.update(self.version))

    async def timed(self, what: str, action: Callable[[], Any]) -> None:
        began = now_ns()
        await action()
        self.seconds[what].append((now_ns() - began) / 1e9)

    async def through_roles(self) -> None:
        """All devices roll out, judge, train, one shift a device or one for the unit, as in a run."""
        each = {role: tuple(Placement(role, (d,)) for d in self.devices) for role in self.steps}
        unit = (Placement(Role.TRAIN, self.devices),)
        await self.shift((), each[Role.ROLLOUT])
        await together(
            self.shift((source,), (target,))
            for source, target in zip(each[Role.ROLLOUT], each[Role.REWARD], strict=True)
        )
        await self.shift(each[Role.REWARD], unit)
        await self.shift(unit, each[Role.ROLLOUT])

    async def shift(self, sources: tuple[Placement, ...], targets: tuple[Placement, ...]) -> None:
        self.shifts += 1
        began = now_ns()
        async for done in self.backend.shift(Shift(self.shifts, sources, targets, How.MIGRATE), self.version):
            took_s, began = (now_ns() - began) / 1e9, now_ns()
            changed = sources if done.step in (Step.PARK, Step.RELEASE) else targets
            if sources and changed:
                self.phases[changed[0].role].setdefault(done.step, []).append(took_s)

    async def restart(self) -> None:
        self.backend.lose(self.devices[0])
        await self.timed("restart", lambda: self.backend.restart(self.devices[0]))

    # ------------------------------------------------------------------------------- fitting

    def fit(self) -> GroupFit:
        seconds = {name: median(values) for name, values in self.seconds.items()}
        phases = {
            role: {step: median(values) for step, values in steps.items()}
            for role, steps in self.phases.items()
        }
        return GroupFit(
            rollout=fit_serving(self.steps[Role.ROLLOUT]),
            reward=fit_serving(self.steps[Role.REWARD]),
            training=fit_training(self.micros, seconds["optimizer"]),
            control=ControlFit(
                publish_s=seconds["publish"], update_s=seconds["update"], restart_s=seconds["restart"],
                phase_s=phases,
            ),
        )  # fmt: skip


def fit_serving(rounds: Sequence[Sequence[Sequence[float]]]) -> ServingFit:
    """From steps [rows, kv tokens, read tokens, seconds] of several rounds."""
    arrays = [np.asarray(steps, dtype=np.float64) for steps in rounds]
    step_s, row_s, kv_s, read_s, token_s = _fit_steps(np.concatenate(arrays))
    return ServingFit(
        step_s=step_s, row_s=row_s, kv_token_s=kv_s, read_s=read_s, read_token_s=token_s,
        held_out_error=_held_out_error(arrays, _fit_steps, _steps_s),
    )  # fmt: skip


def fit_training(rounds: Sequence[Sequence[tuple[float, float]]], optimizer_s: float) -> TrainingFit:
    """From (tokens, seconds) of micro-batches of several rounds."""
    arrays = [np.asarray(micros, dtype=np.float64) for micros in rounds]
    micro_s, token_s = _fit_micros(np.concatenate(arrays))
    return TrainingFit(
        micro_batch_s=micro_s, token_s=token_s, optimizer_s=optimizer_s,
        held_out_error=_held_out_error(arrays, _fit_micros, _micros_s),
    )  # fmt: skip


Coefficients = tuple[float, ...]


def _fit_steps(steps: Floats) -> Coefficients:
    decoding = steps[(steps[:, 2] == 0) & (steps[:, 0] > 0)]
    decode = _least_squares(decoding[:, :2], decoding[:, 3])
    reading = steps[steps[:, 2] > 0]
    alone_s = np.maximum(reading[:, 3] - _decode_s(reading, decode), 1e-6)
    return (*decode, *_least_squares(reading[:, 2:3], alone_s))


def _decode_s(steps: Floats, decode: Coefficients) -> Floats:
    step_s, row_s, kv_s = decode
    return np.where(steps[:, 0] > 0, step_s + row_s * steps[:, 0] + kv_s * steps[:, 1], 0.0)


def _steps_s(steps: Floats, fitted: Coefficients) -> float:
    read_s, token_s = fitted[3:]
    reading = np.where(steps[:, 2] > 0, read_s + token_s * steps[:, 2], 0.0)
    return float(np.sum(_decode_s(steps, fitted[:3]) + reading))


def _fit_micros(micros: Floats) -> Coefficients:
    return _least_squares(micros[:, :1], micros[:, 1])


def _micros_s(micros: Floats, fitted: Coefficients) -> float:
    return float(np.sum(fitted[0] + fitted[1] * micros[:, 0]))


def _held_out_error(
    rounds: list[Floats],
    fit: Callable[[Floats], Coefficients],
    predict: Callable[[Floats, Coefficients], float],
) -> float:
    """Mean absolute error of a round's total seconds (the last column), each predicted from the others."""
    errors = []
    for index, held_out in enumerate(rounds):
        others = np.concatenate([one for number, one in enumerate(rounds) if number != index])
        errors.append(abs(predict(held_out, fit(others)) / float(held_out[:, -1].sum()) - 1))
    return sum(errors) / len(errors)


def _least_squares(slopes: Floats, seconds: Floats) -> tuple[float, ...]:
    """Constant and slopes, none negative. Errors weigh as those of times whose variance grows with them."""
    design = np.column_stack([np.ones(len(slopes)), slopes])
    root = np.sqrt(seconds)
    solution, _ = nnls(design / root[:, None], root)
    return tuple(float(value) for value in solution)


def _generation(sample: Sample, role: Role, prompt: Prompt) -> Generation:
    number = sample.id * 2 + (role is Role.REWARD)
    return Generation(number, sample, role, prompt, key=number)


async def _generate(replica: LiveReplica, sequences: list[Generation]) -> None:
    """Through a replica to their ends, as the runtime does it."""
    known = {sequence.id: sequence for sequence in sequences}
    said: Mailbox[TokenChunk | WorkerLost] = Mailbox()
    replica.listen(said.put)
    replica.submit([work_of(sequence, 0) for sequence in sequences])
    missing = len(known)
    while missing:
        chunk = await said.get()
        if isinstance(chunk, WorkerLost):
            raise chunk
        _extend(known[chunk.sequence], chunk)
        missing -= isinstance(chunk, Finished)


def _extend(sequence: Generation, chunk: TokenChunk) -> None:
    start = sequence.length
    sequence.length += chunk.count
    sequence.tokens.extend(chunk.tokens)
    sequence.logprobs.extend(chunk.logprobs)
    sequence.segments.append(Segment(chunk.version, start, sequence.length))

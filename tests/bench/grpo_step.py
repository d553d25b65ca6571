"""One GRPO step on `tiny-dense`, twice: by our engine and learner, and by TRL's GRPOTrainer.

Both roll out 128 responses (16 prompts x 8 samples), have the same generative judge criticise them, take
the rewards from the verdicts in the critiques' text, and make two optimizer steps of 64 samples. Policy
checkpoint, judge, prompts and hyper-parameters are the same and come from the model group's file.

What is measured: the step itself, from its prompts to its updated weights. For ours that includes folding
the policy into its serving form and handing the new weights over; for TRL, everything between the begin of
the epoch and the end of the second optimizer step. What is not: loading models, building the trainer or
learner, and TRL's set-up and tear-down inside `train()`.

What is not equal: sampling noise, hence lengths (both report their tokens); our inference is in fp64 with
batch-invariant results, TRL's in fp32; our gradients use one thread; our learner skips samples of unanimous
groups, whose gradient is zero, and takes its proximal log-probabilities from the rollout, where TRL computes
them by one more forward pass. Either side judges an identical response to the same prompt once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import workloads
from harness.runs.tiny_models import learner_and_lengths
from systems.backends.base import Work
from systems.batching import canonical_batch
from systems.learning.grpo import GrpoConfig
from systems.model.weights import digest, to_standard
from systems.types import Group, Publishing, Recipe, Role, Sample, Segment, Sequence
from workloads.groups import load_group
from workloads.hops import task
from workloads.hops.workload import HopsWorkload, judge_tokens

GROUP = load_group("tiny-dense")
PROMPTS, SAMPLES = GROUP.workload.prompts, GROUP.workload.samples
STEP_SAMPLES = PROMPTS * SAMPLES
MINI_SAMPLES = STEP_SAMPLES // GROUP.workload.mini_batches
THREADS = 2
BETAS = GrpoConfig(lr=GROUP.learning.lr).betas

Tokens = tuple[int, ...]


def model_directory(which: str) -> Path:
    """Where the group's 'policy' or 'judge' lies."""
    assert GROUP.real is not None
    directory = {"policy": GROUP.real.policy, "judge": GROUP.real.judge}[which]
    return Path(workloads.__file__).parent / directory


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. `seconds` has rollout, judge, update and their total; rewards are by sample."""

    seconds: dict[str, float]
    responses: tuple[str, ...]
    critiques: tuple[str, ...]
    rewards: tuple[float, ...]
    weights_before: str
    weights_after: str

    def tokens(self) -> dict[str, int]:
        """Generated tokens (a character is a token): what was asked for and the longest sequence."""
        return {
            "response": sum(map(len, self.responses)),
            "response_longest": max(map(len, self.responses)),
            "critique": sum(map(len, self.critiques)),
            "critique_longest": max(map(len, self.critiques)),
        }


# ------------------------------------------------------------------------------------------------ ours


class OurStep:
    """The step as the co-simulated backend does it, without the simulated cluster. Runs once."""

    def __init__(self, seed: int) -> None:
        self._learner, self._lengths = learner_and_lengths(GROUP, staleness=0, seed=seed)
        self._workload = HopsWorkload(seed)

    def run(self) -> StepReport:
        torch.set_num_threads(THREADS)
        before = self._digest()
        marks = [time.perf_counter()]
        groups = self._roll_out()
        marks.append(time.perf_counter())
        judgements = self._judge(groups)
        marks.append(time.perf_counter())
        self._update(groups)
        marks.append(time.perf_counter())
        samples = [sample for group in groups for sample in group.samples]
        return StepReport(
            seconds=_split(*(stop - start for start, stop in pairwise(marks))),
            responses=tuple(task.decode(s.response.tokens) for s in samples if s.response),
            critiques=tuple(task.decode(judgement.tokens) for judgement in judgements),
            rewards=tuple(s.reward for s in samples if s.reward is not None),
            weights_before=before,
            weights_after=self._digest(),
        )

    def _digest(self) -> str:
        return digest(to_standard(self._learner.model))

    def _roll_out(self) -> list[Group]:
        groups = []
        for index in range(PROMPTS):
            group = Group(index, self._workload.prompt(index), admitted_version=0)
            for number in range(index * SAMPLES, (index + 1) * SAMPLES):
                sample = Sample(number, group)
                sample.response = Sequence(number, sample, Role.ROLLOUT, group.prompt, key=number)
                group.samples.append(sample)
            groups.append(group)
        self._generate([s.response for g in groups for s in g.samples if s.response])
        return groups

    def _judge(self, groups: list[Group]) -> list[Sequence]:
        judgements = []
        for sample in (sample for group in groups for sample in group.samples):
            number = STEP_SAMPLES + sample.id
            prompt = self._workload.judge_prompt(sample)
            sample.judgements = [Sequence(number, sample, Role.REWARD, prompt, key=number)]
            judgements += sample.judgements
        self._generate(judgements)
        for judgement in judgements:
            judgement.sample.reward = self._workload.verdict(judgement)
        return judgements

    def _generate(self, sequences: list[Sequence]) -> None:
        """Fill in the tokens of all sequences under version 0, which is the judge's as well."""
        works = [Work(s.id, 0, s.role, s.sample.id, s.key, s.prompt, 0) for s in sequences]
        for work in works:
            self._lengths.announce(work, 0)
        for sequence, work in zip(sequences, works, strict=True):
            tokens, logprobs = self._lengths.tokens(work, 0, self._lengths.remaining(work, 0))
            sequence.tokens, sequence.logprobs, sequence.length = list(tokens), list(logprobs), len(tokens)
            sequence.segments = [Segment(0, 0, len(tokens))]

    def _update(self, groups: list[Group]) -> None:
        batch = canonical_batch(groups, self._learner.version, _recipe())
        self._learner.begin(batch)
        for mini in batch.mini_batches:
            for micro in mini:
                self._learner.accumulate(micro)
            self._learner.step()
        self._learner.publish()


def _recipe() -> Recipe:
    workload = GROUP.workload
    return Recipe(
        steps=1,
        prompts=PROMPTS,
        samples=SAMPLES,
        mini_batches=workload.mini_batches,
        micro_batch_samples=workload.micro_batch_samples,
        judge_calls=1,
        staleness=0,
        publishing=Publishing.DRAIN,
    )


def _split(rollout: float, judge: float, update: float) -> dict[str, float]:
    return {"rollout": rollout, "judge": judge, "update": update, "total": rollout + judge + update}


# ------------------------------------------------------------------------------------------------ TRL

TRL_MICRO_SAMPLES = 64  # a mini-batch in one forward pass: 32 and 16 were no faster
TRL_JUDGE_ROWS = 32  # shortest first; 64 and 16 a batch as fast, all in one 1.6 to 2 times as long


@dataclass(slots=True)
class _Stopwatch:
    """Seconds spent in the parts of TRL's step, and the moments between which the step lies."""

    rollout: float = 0.0
    judge: float = 0.0
    begun: float = 0.0
    ended: float = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)
            return result

        call.__name__ = part  # TRL names a reward function in its metrics
        return call

    def seconds(self) -> dict[str, float]:
        return _split(self.rollout, self.judge, self.ended - self.begun - self.rollout - self.judge)


@dataclass(slots=True)
class GenerativeJudge:
    """A TRL reward function: greedy critiques by transformers' `generate`, rewards from their verdicts."""

    model: Any
    responses: list[str] = field(default_factory=list)
    critiques: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        asked = [
            judge_tokens(task.encode(prompt), tuple(response))
            for prompt, response in zip(prompts, completion_ids, strict=True)
        ]
        distinct = sorted(dict.fromkeys(asked), key=len)
        critiques: dict[Tokens, str] = {}
        for start in range(0, len(distinct), TRL_JUDGE_ROWS):
            critiques |= self._critiques(distinct[start : start + TRL_JUDGE_ROWS])
        self.responses = [task.decode(response) for response in completion_ids]
        self.critiques = [critiques[one] for one in asked]
        self.rewards = [task.verdict(critique) or 0.0 for critique in self.critiques]
        return self.rewards

    @torch.no_grad()
    def _critiques(self, asked: list[Tokens]) -> dict[Tokens, str]:
        """Generated in one batch with a KV cache, padded on the left."""
        width = max(map(len, asked))
        ids = torch.full((len(asked), width), task.PAD)
        for row, one in enumerate(asked):
            ids[row, width - len(one) :] = torch.tensor(one)
        lengths = torch.tensor([len(one) for one in asked])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        limit = GROUP.learning.judge_max_new_tokens
        written = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, disable_compile=True
        )
        rows = written[:, width:].tolist()
        return {one: task.decode(_until_stop(row)) for one, row in zip(asked, rows, strict=True)}


def _until_stop(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(task.STOP) + 1] if task.STOP in tokens else tokens


class TrlStep:
    """The step in TRL's GRPOTrainer on the CPU, in fp32 and without logs or checkpoints. Runs once.

    All 128 completions are generated in one batch, gradient checkpointing is off, and the loss is the token
    mean of a mini-batch. A static KV cache, eager attention and transformers' continuous batching (all are
    TRL options) were tried and were slower.
    """

    def __init__(self, seed: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOTrainer

        self._watch = _Stopwatch()
        self._model = AutoModelForCausalLM.from_pretrained(model_directory("policy"))
        self._judge = GenerativeJudge(AutoModelForCausalLM.from_pretrained(model_directory("judge")).eval())
        self._model.generate = self._watch.timed("rollout", self._model.generate)
        self._output = tempfile.TemporaryDirectory()
        self._trainer = GRPOTrainer(
            model=self._model,
            reward_funcs=self._watch.timed("judge", self._judge),
            args=_trl_config(seed, self._output.name),
            train_dataset=_trl_prompts(seed),
            processing_class=AutoTokenizer.from_pretrained(model_directory("policy")),
            callbacks=[_edges(self._watch)],
        )
        _silence(self._trainer)

    def run(self) -> StepReport:
        torch.set_num_threads(THREADS)
        before = digest(self._model.state_dict())
        self._trainer.train()
        assert torch.get_num_threads() == THREADS
        self._output.cleanup()
        return StepReport(
            seconds=self._watch.seconds(),
            responses=tuple(self._judge.responses),
            critiques=tuple(self._judge.critiques),
            rewards=tuple(self._judge.rewards),
            weights_before=before,
            weights_after=digest(self._model.state_dict()),
        )

    def mean_reward_seen(self) -> float:
        """The mean reward that the trainer itself recorded."""
        return float(self._trainer.state.log_history[-1]["reward"])


def _trl_config(seed: int, output: str) -> Any:
    from trl import GRPOConfig

    learning = GROUP.learning
    return GRPOConfig(
        output_dir=output,
        seed=seed,
        max_steps=GROUP.workload.mini_batches,
        num_generations=SAMPLES,
        per_device_train_batch_size=TRL_MICRO_SAMPLES,
        gradient_accumulation_steps=MINI_SAMPLES // TRL_MICRO_SAMPLES,
        steps_per_generation=STEP_SAMPLES // TRL_MICRO_SAMPLES,
        num_iterations=1,
        max_completion_length=learning.max_new_tokens,
        temperature=learning.temperature,
        learning_rate=learning.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=learning.grad_clip,
        epsilon=learning.clip_low,
        epsilon_high=learning.clip_high,
        beta=learning.kl,
        loss_type="bnpo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _trl_prompts(seed: int) -> Any:
    from datasets import Dataset

    workload = HopsWorkload(seed)
    return Dataset.from_dict({"prompt": [task.decode(workload.prompt(i).tokens) for i in range(PROMPTS)]})


def _edges(watch: _Stopwatch) -> Any:
    """A callback that notes when the step begins and when its last optimizer step has ended."""
    from transformers import TrainerCallback

    class Edges(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            watch.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ended = time.perf_counter()

    return Edges()


def _silence(trainer: Any) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)

"""Canonical training units: the same batch is cut the same way wherever and however it was made.

A batch is its groups in id order; mini-batches are consecutive groups; micro-batches are consecutive
samples of one mini-batch. Gradients are summed in micro-batch order. So the update depends on what is
in the batch, not on which devices produced it or in which order it completed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from systems.rewards import trained_on
from systems.types import Group, Prompt, Recipe, Sample, Segment, response_of


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A scored response as the trainer sees it: nothing in it says where it was generated."""

    id: int
    group: int
    prompt: Prompt
    length: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    reward: float

    @property
    def total_tokens(self) -> int:
        return self.prompt.length + self.length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One worker's unit of gradient work. `index` counts through the whole RL step."""

    index: int
    mini_batch: int
    samples: tuple[TrainSample, ...]

    @property
    def total_tokens(self) -> int:
        return sum(sample.total_tokens for sample in self.samples)

    @property
    def total_pairs(self) -> float:
        """(query, key) pairs of causal attention."""
        return sum(n * (n + 1) / 2 for n in (sample.total_tokens for sample in self.samples))


@dataclass(frozen=True, slots=True)
class Batch:
    """One RL step's data, consumed by the trainer at `version`."""

    version: int
    mini_batches: tuple[tuple[MicroBatch, ...], ...]

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        return tuple(s for mini in self.mini_batches for micro in mini for s in micro.samples)


def canonical_batch(groups: Seq[Group], version: int, recipe: Recipe) -> Batch:
    """Cut complete groups (in id order) into mini- and micro-batches."""
    per_mini = -(-len(groups) // recipe.mini_batches)
    minis: list[tuple[MicroBatch, ...]] = []
    index = 0
    for start in range(0, len(groups), per_mini):
        samples = [_train_sample(s) for group in groups[start : start + per_mini] for s in group.samples]
        samples.sort(key=lambda sample: sample.id)
        size = recipe.micro_batch_samples
        parts = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
        minis.append(tuple(MicroBatch(index + i, len(minis), part) for i, part in enumerate(parts)))
        index += len(parts)
    return Batch(version, tuple(minis))


def _train_sample(sample: Sample) -> TrainSample:
    response = response_of(sample)
    return TrainSample(
        id=sample.id,
        group=sample.group.id,
        prompt=response.prompt,
        length=response.length,
        tokens=tuple(response.tokens),
        logprobs=tuple(response.logprobs),
        segments=tuple(response.segments),
        reward=trained_on(sample.reward),
    )

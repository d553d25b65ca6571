"""Hops as a workload: real prompts, a judge that reads the response, rewards from its text alone."""

from __future__ import annotations

import random
from functools import lru_cache

from systems.types import Prompt, Sample, Sequence
from workloads.hops import task


class HopsWorkload:
    """Problem of group g: drawn from a stream named by (seed, g), the same for every system."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._problem = lru_cache(maxsize=4096)(self._draw)

    def prompt(self, group: int) -> Prompt:
        return _prompt(task.encode(self._problem(group).prompt))

    def judge_prompt(self, sample: Sample) -> Prompt:
        assert sample.response is not None
        return _prompt(judge_tokens(sample.group.prompt.tokens, tuple(sample.response.tokens)))

    def verdict(self, judgement: Sequence) -> float | None:
        """What the judge's text says; text without a verdict is worth nothing."""
        return task.verdict(task.decode(judgement.tokens)) or 0.0

    def truth(self, sample: Sample) -> float | None:
        assert sample.response is not None
        return float(task.is_correct(self._problem(sample.group.id), task.decode(sample.response.tokens)))

    def _draw(self, group: int) -> task.Problem:
        return task.make_problem(random.Random(f"{self._seed}/hops/{group}"))


def judge_tokens(prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[int, ...]:
    """What the judge reads: the problem, the response, and the mark after which it writes."""
    return (*prompt, *response, *task.encode(task.JUDGE_MARK))


def _prompt(tokens: tuple[int, ...]) -> Prompt:
    return Prompt(len(tokens), tokens)

"""Hops as a workload: real prompts, a judge that reads the response, rewards from its text alone."""

from __future__ import annotations

import random
from functools import lru_cache

from systems.rewards import UNPARSABLE, Outcome, Verdict
from systems.types import Prompt, Sample, Sequence, response_of
from workloads.hops import task


class HopsWorkload:
    """Problem of group g: drawn from a stream named by (seed, g), the same for every system."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._problem = lru_cache(maxsize=4096)(self._draw)

    def prompt(self, group: int) -> Prompt:
        return _prompt(task.encode(self._problem(group).prompt))

    def judge_prompt(self, sample: Sample) -> Prompt:
        return _prompt(judge_tokens(sample.group.prompt.tokens, tuple(response_of(sample).tokens)))

    def verdict(self, judgement: Sequence) -> Verdict:
        score = task.verdict(task.decode(judgement.tokens))
        return UNPARSABLE if score is None else Verdict(Outcome.SCORED, score)

    def truth(self, sample: Sample) -> float | None:
        text = task.decode(response_of(sample).tokens)
        return float(task.is_correct(self._problem(sample.group.id), text))

    def _draw(self, group: int) -> task.Problem:
        return task.make_problem(random.Random(f"{self._seed}/hops/{group}"))


def judge_tokens(prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[int, ...]:
    """What the judge reads: the problem, the response, and the mark after which it writes."""
    return (*prompt, *response, *task.encode(task.JUDGE_MARK))


def _prompt(tokens: tuple[int, ...]) -> Prompt:
    return Prompt(len(tokens), tokens)

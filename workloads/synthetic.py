"""A workload without text: lengths drawn from declared priors, the same for every system.

The lengths of a group come from a stream that is named by (seed, group), so they do not depend on the
order in which a system happens to ask for them. Nothing here needs torch.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

from systems.backends.base import Work
from systems.estimates.lengths import Lengths as Known
from systems.estimates.lengths import estimate
from systems.rewards import NOT_REAL, Verdict
from systems.types import Prompt, Role, Sample, Sequence, response_of
from workloads.groups import Lengths
from workloads.traces import Trace


class SyntheticWorkload:
    """Prompts, responses and judgements that have only a length."""

    def __init__(
        self, lengths: Lengths, seed: int, samples: int, judge_calls: int, prompts: int,
        trace: Trace | None = None,
    ) -> None:  # fmt: skip
        self._lengths = lengths
        self._prompts = prompts  # groups an RL step: the step of a group is what drift counts
        self._trace = trace
        self._seed = seed
        self._samples = samples
        self._calls = judge_calls
        self._drawn = lru_cache(maxsize=4096)(self._draw)

    def lengths_of(self, group: int) -> tuple[int, list[int], list[list[int]]]:
        """A group's prompt, responses and judgements."""
        return self._drawn(group)

    def prompt(self, group: int) -> Prompt:
        return Prompt(self._drawn(group)[0])

    def judge_prompt(self, sample: Sample) -> Prompt:
        return Prompt(sample.group.prompt.length + response_of(sample).length)

    def verdict(self, judgement: Sequence) -> Verdict:
        return NOT_REAL

    def truth(self, sample: Sample) -> float | None:
        return None

    def total_tokens(self, work: Work) -> int:
        _, responses, judgements = self._drawn(work.sample // self._samples)
        index = work.sample % self._samples
        if work.role is Role.ROLLOUT:
            return responses[index]
        return judgements[index][work.id % (1 + self._calls) - 1]

    def _draw(self, group: int) -> tuple[int, list[int], list[list[int]]]:
        rng = random.Random(f"{self._seed}/lengths/{group}")
        judged: list[int] = []
        if self._trace is not None:
            prompt, responses, judged = self._trace.draw(rng, self._samples, group // self._prompts)
        else:
            prompt, responses = self._prompt(rng), self._responses(rng, group)
        if judged:
            return prompt, responses, [[length] * self._calls for length in judged]
        return prompt, responses, [[self._judge(rng, r) for _ in range(self._calls)] for r in responses]

    def _prompt(self, rng: random.Random) -> int:
        return _clip(rng.lognormvariate(math.log(self._lengths.prompt_mean) - 0.125, 0.5), 1024)

    def _responses(self, rng: random.Random, group: int) -> list[int]:
        """A group's lengths: its difficulty is shared, the rest is each sample's own."""
        lengths = self._lengths
        median = math.log(lengths.response_median) + lengths.drift * (group // self._prompts)
        shared = math.sqrt(lengths.group_share) * rng.gauss(0, 1)
        own = math.sqrt(1 - lengths.group_share)
        return [
            _clip(
                math.exp(median + lengths.response_sigma * (shared + own * rng.gauss(0, 1))),
                lengths.response_cap,
            )
            for _ in range(self._samples)
        ]

    def _judge(self, rng: random.Random, response: int) -> int:
        lengths = self._lengths
        median = lengths.judge_at_1k * (response / 1000) ** lengths.judge_slope
        return _clip(median * math.exp(lengths.judge_sigma * rng.gauss(0, 1)), lengths.judge_cap)


def _clip(value: float, cap: int) -> int:
    return max(1, min(cap, round(value)))


def lognormal(mean: float, cv: float, draws: int = 2000) -> Known:
    """Lengths of which only mean and spread are known: evenly spaced quantiles of a lognormal."""
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)
    drawn = [max(1, round(math.exp(normal.inv_cdf((i + 0.5) / draws)))) for i in range(draws)]
    return replace(estimate(drawn), mean=mean, cv=cv)


def length_priors(lengths: Lengths, trace: Trace | None = None, draws: int = 4000) -> dict[Role, Known]:
    """Moments of the declared priors at the first step, by a fixed Monte Carlo draw that no run uses."""
    workload = SyntheticWorkload(lengths, -1, samples=2, judge_calls=1, prompts=draws, trace=trace)
    drawn = [workload._draw(group) for group in range(draws // 2)]
    responses = [length for _, listed, _ in drawn for length in listed]
    judgements = [call for _, _, judged in drawn for calls in judged for call in calls]
    return {Role.ROLLOUT: estimate(responses), Role.REWARD: estimate(judgements or [1])}

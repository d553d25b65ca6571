"""A finished run as a workload: the same prompts and lengths again, without the text."""

from __future__ import annotations

from collections.abc import Mapping

from systems.backends.base import Work
from systems.rewards import NOT_REAL, Verdict
from systems.types import Prompt, Sample, Sequence


class RecordedWorkload:
    """Lengths by sequence id: of its prompt, and of what was generated."""

    def __init__(
        self, prompts: Mapping[int, int], generated: Mapping[int, int], samples: int, judge_calls: int
    ) -> None:
        self._prompts = prompts
        self._generated = generated
        self._per_sample = 1 + judge_calls
        self._per_group = samples * self._per_sample

    def lengths_of(self, group: int) -> tuple[int, list[int], list[list[int]]]:
        """A group's prompt, responses and judgements."""
        first = group * self._per_group
        samples = range(first, first + self._per_group, self._per_sample)
        judged = [[self._generated[s + 1 + i] for i in range(self._per_sample - 1)] for s in samples]
        return self._prompts[first], [self._generated[s] for s in samples], judged

    def prompt(self, group: int) -> Prompt:
        return Prompt(self._prompts[group * self._per_group])

    def judge_prompt(self, sample: Sample) -> Prompt:
        return Prompt(self._prompts[sample.id * self._per_sample + 1])

    def verdict(self, judgement: Sequence) -> Verdict:
        return NOT_REAL

    def truth(self, sample: Sample) -> float | None:
        return None

    def total_tokens(self, work: Work) -> int:
        return self._generated[work.id]

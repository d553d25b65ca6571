"""What is known of a run's speeds, lengths and costs: first the prior, then what was counted and measured.

Nothing of a running sequence's future gets in here: a batch is observed when it is complete, a shift and a
training step when they have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean as mean

from systems.types import Estimates, Group, Role

SMOOTHING = 0.2  # weight of the newest observation in moving averages (source: artifact-template)


class Estimator:
    """Keeps the one current value of `Estimates`, for whoever dispatches or plans."""

    def __init__(self, prior: Estimates) -> None:
        self.now = prior

    def observe_batch(self, groups: Sequence[Group]) -> None:
        """Take its lengths over. A whole batch is free of the bias of what merely finished first."""
        samples = [sample for group in groups for sample in group.samples]
        lengths, prompts = dict(self.now.length_mean), dict(self.now.prompt_mean)
        lengths[Role.ROLLOUT] = mean(sample.response.length for sample in samples if sample.response)
        prompts[Role.ROLLOUT] = mean(group.prompt.length for group in groups)
        judgements = [judgement for sample in samples for judgement in sample.judgements]
        if judgements:
            lengths[Role.REWARD] = mean(judgement.length for judgement in judgements)
            prompts[Role.REWARD] = mean(judgement.prompt.length for judgement in judgements)
        self.now = replace(self.now, length_mean=lengths, prompt_mean=prompts)

    def observe_training(self, took_s: float, devices: int) -> None:
        """One RL step's training took so long on so many devices."""
        self.now = replace(self.now, train_device_s=took_s * devices)

    def observe_shift(self, took_s: float) -> None:
        """A shift took so long from its drain's end to its targets being ready."""
        known = self.now.shift_s
        self.now = replace(self.now, shift_s=known + SMOOTHING * (took_s - known))

"""What is known of a run's lengths and costs: first the prior, then what was counted and measured.

Nothing of a running sequence's future gets in here: it counts with the tokens that it has by now.

| estimate                 | from                                                                       |
|--------------------------|-----------------------------------------------------------------------------|
| lengths of both roles    | the last H + 1 batches, and all that is under way, as right-censored          |
| prompts of both roles    | the last H + 1 batches                                                       |
| training                 | device-seconds a token, over the last H + 1 steps, times the tokens to come    |
| a shift                  | a moving average, seeded by the cost model                                    |
| reading a context again  | the cost model's, in proportion to the contexts                               |

Why H + 1 batches: with a staleness bound of H that many are under way at once, and the batch that completes
first has the shortest groups among those that were admitted together. It alone would say half of the truth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean as mean

from systems.estimates.lengths import Lengths, estimate
from systems.types import SERVING, Estimates, Group, Recipe, Role, SequencePhase

NOTHING: Mapping[int, int] = {}
SMOOTHING = 0.2  # weight of the newest shift in its moving average (source: artifact-template)


class _Batch:
    """What is kept of a batch: lengths and prompts by role."""

    def __init__(self, groups: Sequence[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        judgements = [judgement for sample in samples for judgement in sample.judgements]
        responses = [sample.response.length for sample in samples if sample.response]
        self.lengths = {Role.ROLLOUT: responses, Role.REWARD: [one.length for one in judgements]}
        self.prompts = {
            Role.ROLLOUT: [group.prompt.length for group in groups],
            Role.REWARD: [judgement.prompt.length for judgement in judgements],
        }
        self.tokens = sum(responses) + sum(group.prompt.length * len(group.samples) for group in groups)


class Estimator:
    """Keeps the one current value of `Estimates`, for whoever dispatches or plans."""

    def __init__(self, prior: Estimates, recipe: Recipe) -> None:
        self.now = prior
        self._prior = prior
        self._samples = recipe.prompts * recipe.samples
        self._batches: deque[_Batch] = deque(maxlen=recipe.staleness + 1)
        self._trained: deque[tuple[float, int]] = deque(maxlen=recipe.staleness + 1)  # device-s, tokens

    def observe_batch(
        self, groups: Sequence[Group], under_way: Iterable[Group] = (), unheard: Mapping[int, int] = NOTHING
    ) -> None:
        """A batch is complete; the groups that are admitted and not in it are `under_way`, and some of their
        sequences have `unheard` tokens beyond those that were streamed."""
        self._batches.append(_Batch(groups))
        ended = {role: [n for batch in self._batches for n in batch.lengths[role]] for role in SERVING}
        running: dict[Role, list[int]] = {role: [] for role in SERVING}
        for group in under_way:
            for sample in group.samples:
                for one in (sample.response, *sample.judgements):
                    if one is not None:
                        done = one.phase is SequencePhase.DONE
                        so_far = one.length + unheard.get(one.id, 0)
                        (ended if done else running)[one.role].append(so_far)
        lengths = {role: estimate(ended[role], running[role]) for role in SERVING if ended[role]}
        prompts = {role: [n for batch in self._batches for n in batch.prompts[role]] for role in SERVING}
        self.now = with_lengths(
            self.now, lengths, {role: mean(listed) for role, listed in prompts.items() if listed}
        )
        self._expect_training()

    def observe_training(self, took_s: float, devices: int) -> None:
        """The newest batch was trained on so long on so many devices."""
        shared_s = max(0.0, took_s - self.now.train_fixed_s)
        self._trained.append((shared_s * devices, self._batches[-1].tokens))
        self._expect_training()

    def _expect_training(self) -> None:
        """A whole batch's training: its tokens, at what a token took."""
        if self._trained:
            a_token_s = sum(took for took, _ in self._trained) / sum(tokens for _, tokens in self._trained)
            tokens = self.now.prompt_mean[Role.ROLLOUT] + self.now.length_mean[Role.ROLLOUT]
            self.now = replace(self.now, train_device_s=a_token_s * tokens * self._samples)

    def observe_shift(self, took_s: float) -> None:
        """A shift took so long from its drain's end to its targets being ready."""
        known = self.now.shift_s
        self.now = replace(self.now, shift_s=known + SMOOTHING * (took_s - known))


def with_lengths(known: Estimates, lengths: dict[Role, Lengths], prompts: dict[Role, float]) -> Estimates:
    """The same estimates with other lengths and prompts, for the roles that are given."""
    means = {**known.length_mean, **{role: one.mean for role, one in lengths.items()}}
    prompt = {**known.prompt_mean, **prompts}
    reread = {
        role: known.reprefill_s[role]
        * (prompt[role] + means[role] / 2)
        / (known.prompt_mean[role] + known.length_mean[role] / 2)
        for role in SERVING
    }
    return replace(
        known,
        length_mean=means,
        length_cv={**known.length_cv, **{role: one.cv for role, one in lengths.items()}},
        length_quantiles={**known.length_quantiles, **{r: one.quantiles for r, one in lengths.items()}},
        prompt_mean=prompt,
        reprefill_s=reread,
    )

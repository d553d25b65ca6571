"""Estimates of somebody who knows how long everything will be: a reference that cannot exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from systems.estimates.estimator import NOTHING, Estimator, with_lengths
from systems.estimates.lengths import estimate
from systems.types import SERVING, Estimates, Group, Recipe, Role

Lengths = tuple[int, list[int], list[list[int]]]  # a group's prompt, responses, and judgements by response


class TrueLengths(Estimator):
    """Knows the lengths of the groups that are under way; the rest is learned as by everybody else."""

    def __init__(self, prior: Estimates, recipe: Recipe, lengths_of: Callable[[int], Lengths]) -> None:
        super().__init__(prior, recipe)
        self._lengths_of = lengths_of
        self._prompts = recipe.prompts
        self._groups = recipe.prompts * recipe.steps
        self._know(range(min(self._groups, (recipe.staleness + 1) * recipe.prompts)))

    def observe_batch(
        self, groups: Sequence[Group], under_way: Iterable[Group] = (), unheard: Mapping[int, int] = NOTHING
    ) -> None:
        super().observe_batch(groups, under_way, unheard)
        ids = {group.id for group in under_way}
        first = max(ids | {group.id for group in groups}) + 1  # one more batch is admitted after this one
        self._know(ids | set(range(first, min(self._groups, first + self._prompts))))

    def _know(self, groups: Iterable[int]) -> None:
        drawn = [self._lengths_of(group) for group in groups]
        if not drawn:
            return
        responses = [length for _, listed, _ in drawn for length in listed]
        judgements = [length for _, _, judged in drawn for calls in judged for length in calls]
        known = {Role.ROLLOUT: responses, Role.REWARD: judgements}
        lengths = {role: estimate(known[role]) for role in SERVING if known[role]}
        self.now = with_lengths(self.now, lengths, {})
        self._expect_training()

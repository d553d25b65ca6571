"""The staleness bound: who may be admitted, and who goes into a batch. Enforced here and nowhere else.

A version is one RL step, published atomically. Batch b is consumed when the trainer is at version b.
The staleness of a sample is that version minus the version of its oldest policy token, and may never
exceed the bound H:

    admission   a group of batch b is admitted once version >= b - H
    membership  oldest admitted version first, then completion order
    waiting     the trainer waits for older groups before it takes younger ones; nothing is dropped

Why older versions come first without exception: by version v, (v + H + 1) batches are admitted, all of
which must be consumed by version v + H. There is exactly one place for each, so a younger group taken
early would leave an older one without a place in time. Completion order decides only within a version:
among the (H + 1) batches that are admitted at version 0, and wherever a version admits several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from systems.lifecycle import IllegalTransition
from systems.types import SERVING, Coming, Group, Recipe, Role


class StalenessViolated(RuntimeError):
    """A sample older than the bound was about to be trained on: a bug, never a user's error."""


class Admission:
    """Admitted and complete groups, and the batches made of them.

    `untrained` is the number of samples of a batch that was taken and waits for a training unit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.untrained = 0
        self._admitted: dict[int, Group] = {}  # in admission order, until batched
        self._scored: dict[int, Group] = {}  # in completion order, until batched
        self._open: dict[int, int] = {}  # groups not batched yet, by admitted version, oldest first
        self._complete: dict[int, int] = {}  # of these, the scored ones
        self._ready: bool | None = None  # what `ready` found, until something changes

    def admits(self, batch: int, version: int) -> bool:
        """May the groups of batch `batch` be admitted at this version?"""
        return version >= batch - self.recipe.staleness

    def admit(self, group: Group) -> None:
        self._admitted[group.id] = group
        self._open[group.admitted_version] = self._open.get(group.admitted_version, 0) + 1
        self._ready = None

    def score(self, group: Group) -> None:
        """All samples of an admitted group have their reward."""
        if group.id not in self._admitted:
            raise IllegalTransition(f"group {group.id} was scored but is not admitted")
        if group.id in self._scored:
            raise IllegalTransition(f"group {group.id} was scored twice")
        self._scored[group.id] = group
        self._complete[group.admitted_version] = self._complete.get(group.admitted_version, 0) + 1
        self._ready = None

    def ready(self) -> bool:
        """Is there a batch for the trainer? It is asked far more often than anything changes."""
        if self._ready is None:
            self._ready = self._has_batch()
        return self._ready

    def _has_batch(self) -> bool:
        missing = self.recipe.prompts
        for admitted_version, open_groups in self._open.items():
            if self._complete.get(admitted_version, 0) < min(missing, open_groups):
                return False
            missing -= min(missing, open_groups)
            if not missing:
                return True
        return False

    def batch_ready(self) -> bool:
        """Would a training unit have something to do?"""
        return self.untrained > 0 or self.ready()

    def coming(self) -> tuple[Coming, ...]:
        """Admitted samples by phase, in the batches that they will make, the next batch first."""
        batches = [Coming(0, 0, self.untrained)] if self.untrained else []
        for groups in self.next_batches():
            rolling, judging = sum(g.rolling for g in groups), sum(g.judging for g in groups)
            scored = len(groups) * self.recipe.samples - rolling - judging
            since = (_since_ns(groups, role) for role in SERVING)
            batches.append(Coming(rolling, judging, scored, *since))
        return tuple(batches)

    def under_way(self) -> Collection[Group]:
        """Groups that are admitted and not in a batch yet."""
        return self._admitted.values()

    def next_batches(self) -> list[list[Group]]:
        """Admitted groups in the batches that they will make, most complete ones first in a version."""
        order = sorted(
            self._admitted.values(),
            key=lambda g: (g.admitted_version, g.rolling + g.judging, g.rolling, g.id),
        )
        size = self.recipe.prompts
        return [order[i : i + size] for i in range(0, len(order), size)]

    def take(self, version: int) -> list[Group]:
        """The batch consumed at `version`, in group order. Raises `IllegalTransition` unless `ready()`."""
        if not self.ready():
            raise IllegalTransition(f"the batch of version {version} was taken before it was ready")
        completion = {group_id: order for order, group_id in enumerate(self._scored)}
        by_age = sorted(
            self._scored.values(), key=lambda group: (group.admitted_version, completion[group.id])
        )
        batch = sorted(by_age[: self.recipe.prompts], key=lambda group: group.id)
        self._ready = None
        for group in batch:
            del self._scored[group.id]
            del self._admitted[group.id]
            self._open[group.admitted_version] -= 1
            self._complete[group.admitted_version] -= 1
            for sample in group.samples:
                self.check(sample.oldest_version, version, sample.id)
        return batch

    def check(self, oldest: int, version: int, sample_id: int) -> None:
        if not 0 <= version - oldest <= self.recipe.staleness:
            raise StalenessViolated(
                f"sample {sample_id} was begun at version {oldest} and is consumed at {version}; "
                f"the bound is {self.recipe.staleness}"
            )


def _since_ns(groups: Iterable[Group], role: Role) -> int | None:
    """When the unfinished sequences of a role began, in the mean; None where none has."""
    begun = begun_ns = 0
    for group in groups:
        begun += group.begun.get(role, 0)
        begun_ns += group.begun_ns.get(role, 0)
    return begun_ns // begun if begun else None

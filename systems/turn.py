"""When the policy is asked: once something has changed rates, not for every sequence.

Whoever changes what is kept here calls `look`; whoever needs the policy in any case calls `now`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from systems.staleness import Admission
from systems.types import SERVING, Recipe, Role, Sequence

WAKES_PER_BATCH = 8  # the policy is asked whenever a role's outstanding work crosses 1/8 of a batch


@dataclass(slots=True)
class Demand:
    """What the serving replicas have to do. `version` is the published one."""

    version: int = 0
    idle_replicas: int = 0
    waiting: dict[Role, deque[Sequence]] = field(default_factory=lambda: {role: deque() for role in SERVING})
    running: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(SERVING, 0))

    def outstanding(self, role: Role) -> int:
        """Sequences that wait or run."""
        return len(self.waiting[role]) + self.running[role]


class Turn:
    """The policy's turn: `wait` for it. `training_since` is None while nothing trains."""

    def __init__(self, recipe: Recipe, admission: Admission) -> None:
        self.demand = Demand()
        self.training_since: int | None = None
        self._admission = admission
        self._grain = max(1, recipe.prompts * recipe.samples // WAKES_PER_BATCH)
        self._seen: tuple[object, ...] = ()
        self._come = asyncio.Event()
        self._had = asyncio.Event()

    def now(self) -> None:
        """It is the policy's turn, whether rates have changed or not."""
        self._come.set()

    async def offer(self) -> None:
        """It is the policy's turn; returns when it has had it, with a view of this moment or a later one."""
        self._had.clear()
        self._come.set()
        await self._had.wait()

    def had(self) -> None:
        """The policy has had its turn, and the shifts that can start have started."""
        self._had.set()

    def look(self) -> None:
        """Something happened: is it the policy's turn?"""
        demand, grain = self.demand, self._grain
        rollouts, judgements = demand.outstanding(Role.ROLLOUT), demand.outstanding(Role.REWARD)
        seen = (
            demand.version, self.training_since, self._admission.batch_ready(), demand.idle_replicas,
            -(-rollouts // grain), -(-judgements // grain),
        )  # fmt: skip
        if seen != self._seen:
            self._seen = seen
            self._come.set()

    async def wait(self) -> None:
        """Until it is the policy's turn, and everything that happens at this moment can be seen at once."""
        await self._come.wait()
        self._come.clear()
        await asyncio.sleep(0)

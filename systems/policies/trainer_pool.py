"""Trainer-pool: three fixed pools, and extra replicas on the trainer's devices while it idles."""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import Split, count, place_blocks, template_roles
from systems.types import Layout, Plan, Role, View


@dataclass(frozen=True, slots=True)
class Nothing:
    """A system that goes by what it sees remembers nothing."""


class TrainerPool:
    """The template split. While no batch is ready and nothing trains, the training unit's blocks are rollout
    and reward replicas, in the proportion of the template, always the same ones."""

    name = "trainer-pool"
    default_staleness = 2
    time_shares = False

    def begin(self, layout: Layout) -> Nothing:
        return Nothing()

    def plan(self, view: View, memory: Nothing) -> tuple[Plan, Nothing]:
        roles = template_roles(view.layout)
        training = view.training
        if training.batch_ready or training.started_ns is not None:
            return Plan(place_blocks(view.layout, roles), why="the trainer trains"), memory
        extra = _extra(count(roles))
        lent = extra + tuple(role for role in roles if role is not Role.TRAIN)
        return Plan(place_blocks(view.layout, lent), why="the trainer idles"), memory


def _extra(template: Split) -> tuple[Role, ...]:
    """Roles of the trainer's blocks while it idles; training comes first in a template."""
    serving = template.rollout + template.reward
    rollouts = round(template.train * template.rollout / serving) if serving else template.train
    return (Role.ROLLOUT,) * rollouts + (Role.REWARD,) * (template.train - rollouts)

"""Disaggregated: three fixed pools, each with one role for the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import static_split
from systems.types import Layout, Plan, View


@dataclass(frozen=True, slots=True)
class Nothing:
    """A static system remembers nothing."""


class Disaggregated:
    """The template split of the layout."""

    name = "disaggregated"
    default_staleness = 2
    time_shares = False

    def begin(self, layout: Layout) -> Nothing:
        return Nothing()

    def plan(self, view: View, memory: Nothing) -> tuple[Plan, Nothing]:
        return Plan(static_split(view.layout, view.layout.template), why="template split"), memory

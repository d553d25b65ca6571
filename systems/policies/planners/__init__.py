"""Planners: which split of the blocks a resource-shiftable system should have now. Found by name.

A planner is a class with `name`, `tick_s`, `cooldown_shifts`, `begin` and `choose`. Adding one means a file
here and a line in `PLANNERS`; `pivot` turns the split that it chooses into placements.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from systems.policies.layouts import Split
from systems.policies.planners.clairvoyant import Clairvoyant
from systems.policies.planners.flow import Flow
from systems.policies.planners.harmonic import Harmonic
from systems.policies.planners.rules import Rules
from systems.types import View

M = TypeVar("M")


class Planner(Protocol[M]):
    """What `pivot` asks. `choose` is pure; `memory` is a frozen value that survives between calls. One that
    `knows_lengths` is told the true ones, and only exists in simulation.

    It is asked when rates have changed, every `tick_s` seconds, and not within `cooldown_shifts` shifts of
    its last change unless a batch waits for a training unit.
    """

    name: str
    knows_lengths: bool
    tick_s: float
    cooldown_shifts: float

    def begin(self) -> M: ...

    def choose(self, view: View, now: Split, memory: M) -> tuple[Split, str, M]:
        """The split to have, why (one line for people), and what to remember."""
        ...


PLANNERS: dict[str, type[Planner[Any]]] = {
    "flow": Flow,
    "itl-harmonic": Harmonic,
    "rules": Rules,
    "clairvoyant": Clairvoyant,
}
DEFAULT_PLANNER = "flow"

"""The backends that a run can be made on, each a record of what is real about it.

| backend | tokens, verdicts, gradients | durations                | devices                   |
|---------|-----------------------------|--------------------------|---------------------------|
| sim     | lengths only                | cost model, virtual time | simulated                 |
| cosim   | real, from tiny models      | cost model, virtual time | simulated                 |
| live    | real, from tiny models      | the wall clock           | one worker process each   |

Whoever asks what a backend is like reads a field here; nobody compares names.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from systems.backends.base import Backend
from systems.backends.sim.backend import SimBackend
from systems.backends.sim.lengths import DrawnLengths
from systems.backends.sim.training import CountingLearner
from systems.costs.durations import ClusterDurations
from systems.loop.clock import run_live, run_virtual
from systems.pipeline import Workload
from systems.types import Kind, Recipe
from workloads.groups import ModelGroup
from workloads.recorded import RecordedWorkload
from workloads.synthetic import SyntheticWorkload
from workloads.traces import Trace

CPU = "cpu"  # what a live worker runs on


class Learned(Protocol):
    """What a run with real weights has learned."""

    def weights_sha256(self) -> str: ...

    def save(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class Request:
    """What a backend is built from."""

    group: ModelGroup
    seed: int
    recipe: Recipe
    cost: ClusterDurations
    trace: Trace | None = None


Built = tuple[Backend, Workload, Learned | None]


@dataclass(frozen=True)
class BackendKind:
    """One way to make a run. `unread` are settings of a group that mean nothing to it; `sequence_s` is about
    what a sequence takes on the wall clock, for forecasts, where that does not hang on the machine."""

    name: str
    kind: Kind  # of its numbers
    real: bool  # text, verdicts and gradients
    hardware: str | None  # what its devices are; None: what the group says
    clock: Callable[[Coroutine[Any, Any, None]], None]
    build: Callable[[Request], Built]
    unread: tuple[str, ...]
    sequence_s: float | None = None

    @property
    def measured(self) -> bool:
        """Are its durations the wall clock's?"""
        return self.kind is Kind.MEASURED


def _simulated(asked: Request) -> Built:
    recipe = asked.recipe
    workload = SyntheticWorkload(
        asked.group.lengths, asked.seed, recipe.samples, recipe.judge_calls, recipe.prompts, asked.trace
    )
    lengths, gpus = DrawnLengths(workload), asked.group.cluster.gpus
    return SimBackend(Kind.SIMULATED, asked.cost, lengths, CountingLearner(), gpus), workload, None


def recorded(workload: RecordedWorkload, cost: ClusterDurations, gpus: int) -> Built:
    """A finished run's lengths on the simulated cluster, whatever it was made on."""
    backend = SimBackend(Kind.SIMULATED, cost, DrawnLengths(workload), CountingLearner(), gpus)
    return backend, workload, None


def _cosimulated(asked: Request) -> Built:
    from harness.runs.tiny_models import cosimulated  # torch is loaded only where it is used

    return cosimulated(asked.group, asked.seed, asked.cost, asked.recipe)


def _live(asked: Request) -> Built:
    from harness.runs.tiny_models import live

    return live(asked.group, asked.seed)


SIM = BackendKind(
    "sim", Kind.SIMULATED, False, None, run_virtual, _simulated, ("learning.*", "live.*"), sequence_s=2e-4
)
COSIM = BackendKind(
    "cosim", Kind.COSIMULATED, True, None, run_virtual, _cosimulated, ("lengths.*", "live.*"), sequence_s=4e-3
)
LIVE = BackendKind(
    "live", Kind.MEASURED, True, CPU, run_live, _live,
    (
        "lengths.*", "costs.*", "memory.*", "pair.*", "cluster.hardware", "cluster.engine",
        "cluster.token_scale", "cluster.max_running", "cluster.sync", "workload.handover",
    ),
)  # fmt: skip
BACKENDS = {backend.name: backend for backend in (SIM, COSIM, LIVE)}


def usual(group: ModelGroup) -> BackendKind:
    """What a group runs on if nothing is said."""
    return COSIM if group.real else SIM

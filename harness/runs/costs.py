"""What a run's durations come from. The one place where a cost model is made.

| kind of run             | its durations                                                          |
|-------------------------|------------------------------------------------------------------------|
| simulated, co-simulated | the group's pair on the group's hardware, from fitted coefficients      |
| measured                | the clock's; what live workers cost here is for planner and comparison  |
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

import workloads
from harness.runs.live_costs import Calibration
from systems import costs
from systems.costs.cost import NOMINAL, ClusterCost, cluster_cost
from systems.costs.durations import ClusterDurations
from systems.costs.hardware import load_hardware
from systems.costs.machines import MOST_MACHINES, machine
from workloads.groups import ModelGroup, architecture_of

COEFFICIENTS = Path(costs.__file__).parent


class Machine(BaseModel):
    """Which of `of` plausible machines a run is on, from 1 (`systems/costs/machines.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: Annotated[int, Field(ge=1, le=MOST_MACHINES)]
    of: Annotated[int, Field(ge=1, le=MOST_MACHINES)]

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Machine:
        if self.number > self.of:
            raise ValueError(f"there is no machine {self.number} of {self.of}")
        return self

    def __str__(self) -> str:
        return f"{self.number} of {self.of}"


def cost_of(
    group: ModelGroup, real: bool, calibration: Calibration | None, on: Machine | None = None
) -> ClusterDurations:
    """Durations of a run of `group`; `real` says that its tokens are those of small real models."""
    return calibration.cluster(group) if calibration is not None else modelled(group, real, on)


def modelled(group: ModelGroup, real: bool, on: Machine | None = None) -> ClusterCost:
    """The pair's cost model on the nominal machine, or another plausible one; only a real model's tokens
    stand for several of the pair's."""
    return cluster_cost(
        architecture_of(group, group.pair.policy),
        architecture_of(group, group.pair.judge),
        load_hardware(group.cluster.hardware),
        policy_tp=group.pair.policy_tp,
        judge_tp=group.pair.judge_tp,
        max_running=group.cluster.max_running,
        gpus_per_node=group.cluster.gpus_per_node,
        train_stages=group.pair.train_stages,
        mini_batch_samples=group.workload.prompts * group.workload.samples // group.workload.mini_batches,
        token_scale=group.cluster.token_scale if real else 1,
        engine=group.cluster.engine,
        memory_share=group.memory.share,
        sync=group.cluster.sync,
        routing_skew=group.pair.routing_skew,
        sequence_tokens=longest_training_tokens(group) if not real else 0,
        factors=group.costs.model_dump(),
        slower=machine(group.cluster.hardware, on.number, on.of) if on else NOMINAL,
    )


def longest_training_tokens(group: ModelGroup) -> int:
    """The longest sequence that a training unit may have to hold: a prompt with a response at its cap."""
    return round(group.lengths.prompt_mean) + group.lengths.response_cap


@cache
def costs_sha256() -> str:
    """The digest of every coefficient that a simulated duration comes from."""
    shapes = Path(workloads.__file__).parent / "architectures.toml"
    sha = hashlib.sha256(shapes.read_bytes())
    for path in sorted([*COEFFICIENTS.glob("*.toml"), *COEFFICIENTS.glob("hardware/*.toml")]):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()

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

import workloads
from harness.runs.live_costs import Calibration
from systems import costs
from systems.costs.cost import ClusterCost, cluster_cost
from systems.costs.durations import ClusterDurations
from systems.costs.hardware import load_hardware
from workloads.groups import ModelGroup, architecture_of

COEFFICIENTS = Path(costs.__file__).parent


def cost_of(group: ModelGroup, real: bool, calibration: Calibration | None) -> ClusterDurations:
    """Durations of a run of `group`; `real` says that its tokens are those of small real models."""
    return calibration.cluster(group) if calibration is not None else modelled(group, real)


def modelled(group: ModelGroup, real: bool) -> ClusterCost:
    """The pair's cost model; only a real model's tokens stand for several of the pair's."""
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
        factors=group.costs.model_dump(),
    )


@cache
def costs_sha256() -> str:
    """The digest of every coefficient that a simulated duration comes from."""
    shapes = Path(workloads.__file__).parent / "architectures.toml"
    sha = hashlib.sha256(shapes.read_bytes())
    for path in sorted([*COEFFICIENTS.glob("*.toml"), *COEFFICIENTS.glob("hardware/*.toml")]):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()

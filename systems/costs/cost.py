"""How long things take on the simulated cluster: serving, training, moving parameters.

Serving is kernels and an engine's host layer (`forward.py`). Training is FLOPs at what GEMMs reach, and a
rest that published RL steps imply (`training.py`). Shifts and publishing are seconds plus bytes through the
host memory of a node, whose devices share it (`shift.toml`). How well each is known: docs/simulator.md.

With `token_scale` s one token of a small real model stands for s tokens of the modelled pair.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.durations import BLOCK, Bounds, Costs
from systems.costs.forward import Forward, StepTables, engines
from systems.costs.hardware import Hardware
from systems.costs.kernels import FORMS, kernels_of, measured_on
from systems.costs.memory import SHARE, EngineMemory, kv_blocks, kv_token_bytes, state_blocks, weight_bytes
from systems.costs.training import TrainingCost, seconds_a_flop, trained
from systems.types import SERVING, Role, Shift, Speed, Step

HERE = Path(__file__).parent
ENGINE = "vllm-0.12"  # where a group names no other
TOKEN_BUDGET = 8192  # tokens a step: what vLLM's server takes on devices of 70 GiB and more
NOMINAL: Mapping[str, float] = {}
NO_FACTORS = dict.fromkeys(("compute", "memory", "link", "host", "training", "shift"), 1.0)
SPARED = (0.0, 0.02, 0.05, 0.1, 0.2)  # of a generated token's price, for what is read beside it
PLANNER_BATCH = 8  # the small batch that the planner's straight line goes through


@dataclass(frozen=True)
class ServingCost:
    """One replica of `tp` devices. Everything but `speed` and capacities is in the pair's own tokens."""

    architecture: Architecture
    hardware: Hardware
    tp: int
    max_running: int
    token_scale: int = 1
    engine: str = ENGINE
    memory_share: float = SHARE
    slower: Mapping[str, float] = field(default_factory=dict)  # factors on seconds and bytes
    routing_skew: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.architecture.name} on {self.tp} x {self.hardware.name}"

    @property
    def devices(self) -> int:
        return self.tp

    @cached_property
    def forward(self) -> Forward:
        host = engines()[self.engine].host.scaled(self.slower.get("host", 1.0))
        kernels = kernels_of(self.hardware).scaled(self.slower)
        return Forward(self.architecture, kernels, host, self.tp, routing_skew=self.routing_skew)

    @property
    def memory(self) -> EngineMemory:
        """How its engine is configured."""
        engine = engines()[self.engine]
        return EngineMemory(
            self.memory_share, self.max_running, TOKEN_BUDGET, engine.sampler, engine.graphs_bytes,
            self.slower.get("memory", 1.0),
        )  # fmt: skip

    @cached_property
    def tables(self) -> StepTables:
        return StepTables(self.forward, self.max_running, TOKEN_BUDGET)

    def costs(self) -> Costs:
        return self.tables.costs()

    def bounds(self) -> Bounds:
        return Bounds(self.max_running, TOKEN_BUDGET, self._blocks, state_blocks(self.architecture, self.tp))

    @cached_property
    def _blocks(self) -> int:
        return kv_blocks(self.architecture, self.hardware, self.tp, self.memory)

    @property
    def kv_capacity_tokens(self) -> int:
        """Context tokens that fit beside the weights, in the workload's tokens; negative if those do not."""
        return self._blocks * BLOCK // self.token_scale

    def token_s(self, running: int) -> float:
        """A decode step of `running` sequences without their cache, in the workload's tokens."""
        return self.token_scale * self.tables.alpha[running]

    def kv_s(self, running: int) -> float:
        """More for each context token, in the workload's tokens."""
        return self.token_scale**2 * self.tables.beta[running]

    def prefill_s(self, context_tokens: int) -> float:
        """Reading one context of so many of the workload's tokens in, alone."""
        left, done, seconds = context_tokens * self.token_scale, 0, 0.0
        while left > 0:
            chunk = min(left, TOKEN_BUDGET)
            pairs = chunk * done + chunk * (chunk + 1) / 2
            seconds += self.tables.mixed_s(0, 0.0, chunk, pairs, done + chunk, int(chunk == left))
            done, left = done + chunk, left - chunk
        return seconds

    def prices(self) -> tuple[tuple[float, float], ...]:
        scale = self.token_scale
        found = (self.tables.prices(spared) for spared in SPARED)
        return tuple((generated * scale, read * scale) for generated, read in found)

    def cache_bytes(self, context_tokens: int) -> float:
        """A sequence's KV cache and the state of its linear attention, on each device."""
        token_bytes = kv_token_bytes(self.architecture, self.tp)
        state_bytes = self.architecture.state_bytes_per_sequence / self.tp
        return context_tokens * self.token_scale * token_bytes + state_bytes

    def speed(self) -> Speed:
        """The planner's throughput model: a line through a small and a full batch, flat below the small."""
        full = self.max_running
        small = min(PLANNER_BATCH, full)
        slope = max(0.0, (self.token_s(full) - self.token_s(small)) / (full - small)) if full > small else 0.0
        return Speed(
            a=self.kv_s(full),
            b=slope * small,
            c=slope,
            d=self.token_s(small) - slope * small,
            max_running=full,
            kv_capacity_tokens=self.kv_capacity_tokens,
            ahead=full // 32,
        )


class Sync(StrEnum):
    """How a new version of the policy gets from the training unit to the replicas."""

    STORE = "store"  # each device writes its part to a store in host memory, replicas read what they need
    GATHER = "gather"  # the unit gathers every parameter and sends it to all replicas


@dataclass(frozen=True)
class GatherCost:
    """Seconds a byte and a tensor of the policy's parameters."""

    byte_s: float
    tensor_s: float

    def seconds(self, model: Architecture) -> float:
        return model.weight_bytes * self.byte_s + model.tensors * self.tensor_s


@dataclass(frozen=True)
class ClusterCost:
    """All durations of one model group on one cluster."""

    serving: dict[Role, ServingCost]
    training: TrainingCost
    phase_s: dict[str, float]
    control_s: dict[str, float]
    gpus_per_node: int
    sync: Sync = Sync.STORE
    gathering: GatherCost = GatherCost(0.0, 0.0)

    @property
    def token_scale(self) -> int:
        return self.training.token_scale

    @property
    def extrapolated(self) -> bool:
        device = self.training.hardware.name
        return any(measured_on(kernel, device) != device for kernel in FORMS if kernel != "linear_attention")

    @property
    def restart_s(self) -> float:
        return self.control_s["restart"]

    def copy_s(self, moved: float, sharing: int) -> float:
        """A device's bytes to or from host memory, while `sharing` devices of its node copy."""
        hardware = self.training.hardware
        return moved / min(hardware.pcie_bytes_per_s, hardware.node_host_bytes_per_s / max(1, sharing))

    def phase(self, step: Step, shift: Shift) -> tuple[float, int]:
        """Seconds without copying, and the bytes that a device copies; nothing where it does not apply.

        PARK is for training state; giving up needs a source, taking on needs a target.
        """
        placements = shift.sources if step in (Step.PARK, Step.RELEASE) else shift.targets
        if step is Step.PARK:
            placements = tuple(source for source in placements if source.role is Role.TRAIN)
        if not placements:
            return 0.0, 0
        moved = 0.0
        if step in (Step.PARK, Step.LOAD):
            moved = max(self._bytes(placement.role, len(placement.devices)) for placement in placements)
        return self.phase_s[step], round(moved)

    def _bytes(self, role: Role, devices: int) -> float:
        """What each device of a placement reads: a replica's parameters, or its part of the optimizer."""
        if role in SERVING:
            cost = self.serving[role]
            return weight_bytes(cost.architecture, cost.tp)
        return self.training.optimizer_bytes / devices

    def host_cache_bytes(self, devices: int) -> float:
        """Beside the parameter store (two policies and the judge) and parked optimizer state."""
        judge = self.serving[Role.REWARD].architecture
        stored = 2 * self.training.architecture.weight_bytes + judge.weight_bytes
        parked = self.training.optimizer_bytes
        return max(0.0, devices * self.training.hardware.host_memory_bytes - stored - parked)

    def publish_s(self, devices: int) -> float:
        """Until a new version is where replicas can load it from, or with `GATHER`, in all of them."""
        if self.sync is Sync.GATHER:
            return self.control_s["publish"] + self.gathering.seconds(self.training.architecture)
        weights = self.training.architecture.params_total * BYTES_PER_PARAMETER / devices
        return self.control_s["publish"] + self.copy_s(weights, min(devices, self.gpus_per_node))

    def update_s(self) -> float:
        """With all of its node: replicas are told of a version at the same moment."""
        if self.sync is Sync.GATHER:
            return self.control_s["update"]
        return self.control_s["update"] + self.copy_s(self._bytes(Role.ROLLOUT, 1), self.gpus_per_node)

    def warm_shift_s(self) -> float:
        """A typical shift into a serving role, for the planner's first estimate."""
        slowest = max(self.copy_s(self._bytes(role, 1), self.serving[role].devices) for role in self.serving)
        return sum(self.phase_s.values()) + slowest


def cluster_cost(
    policy: Architecture, judge: Architecture, hardware: Hardware, *, policy_tp: int, judge_tp: int,
    max_running: int, gpus_per_node: int = 8, train_stages: int = 1, mini_batch_samples: int = 512,
    token_scale: int = 1, engine: str = ENGINE, memory_share: float = SHARE, sync: Sync = Sync.STORE,
    sequence_tokens: int = 0, routing_skew: float = 0.0, factors: Mapping[str, float] = NO_FACTORS,
    slower: Mapping[str, float] = NOMINAL,
) -> ClusterCost:  # fmt: skip
    """The cost model of a model group. `factors` multiply its coefficients (see `NO_FACTORS`), `slower` says
    which machine of those that the coefficients' bands allow it is (see `machines.py`)."""
    by = {**NO_FACTORS, **factors}
    slower = {**slower, "host": slower.get("host", 1.0) * by["host"]}
    hardware = replace(
        hardware,
        bf16_flops=hardware.bf16_flops * by["compute"],
        memory_bytes_per_s=hardware.memory_bytes_per_s * by["memory"],
        nvlink_bytes_per_s=hardware.nvlink_bytes_per_s * by["link"],
        pcie_bytes_per_s=hardware.pcie_bytes_per_s * by["link"],
        node_host_bytes_per_s=hardware.node_host_bytes_per_s * by["link"] / slower.get("copy", 1.0),
    )
    shift: dict[str, Any] = tomllib.loads((HERE / "shift.toml").read_text())
    share = trained()["utilisation"]["experts" if policy.experts else "dense"]
    flop_s = seconds_a_flop(hardware, share) / by["training"] * slower.get("training", 1.0)
    byte_s = trained()["communication"]["byte_s"] / by["link"] * slower.get("communication", 1.0)
    phase_s, control_s = (
        {name: seconds * by["shift"] * slower.get(axis, 1.0) for name, seconds in shift[table].items()}
        for table, axis in (("phase_s", "shift"), ("control_s", "update"))
    )
    training = TrainingCost(
        policy,
        hardware,
        control_s["optimizer"],
        flop_s,
        byte_s,
        train_stages,
        policy_tp,
        mini_batch_samples,
        token_scale,
        sequence_tokens,
    )
    return ClusterCost(
        serving={
            role: ServingCost(
                model, hardware, tp, max_running, token_scale, engine, memory_share, slower, routing_skew
            )
            for role, model, tp in ((Role.ROLLOUT, policy, policy_tp), (Role.REWARD, judge, judge_tp))
        },
        training=training,
        phase_s=phase_s,
        control_s=control_s,
        gpus_per_node=gpus_per_node,
        sync=sync,
        gathering=GatherCost(
            *(shift["gather"][k] * slower.get("update", 1.0) for k in ("byte_s", "tensor_s"))
        ),
    )

"""How long things take on the simulated cluster: serving, training, moving parameters.

Serving is kernels and an engine's host layer (`forward.py`). Training is FLOPs at what GEMMs reach, and a
rest that published RL steps imply (`training.toml`). Shifts and publishing are seconds plus bytes through the
host memory of a node, whose devices share it (`shift.toml`). How well each is known: docs/simulator.md.

With `token_scale` s one token of a small real model stands for s tokens of the modelled pair.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.durations import BLOCK, Bounds, Costs
from systems.costs.forward import Forward, StepTables, engines
from systems.costs.hardware import MEASURED_ON, Hardware, load_hardware
from systems.costs.kernels import coefficients, kernels_of
from systems.costs.memory import (
    OPTIMIZER_BYTES,
    TRAIN_STATE_BYTES,
    kv_blocks,
    train_devices,
    weight_bytes,
)
from systems.types import SERVING, Role, Shift, Speed, Step

HERE = Path(__file__).parent
ENGINE = "vllm"
TOKEN_BUDGET = 8192  # tokens a step: what vLLM's server takes on devices of 70 GiB and more
NO_FACTORS = dict.fromkeys(("compute", "memory", "link", "host", "training", "shift"), 1.0)
PLANNER_BATCH = 8  # the small batch that the planner's straight line goes through


@dataclass(frozen=True)
class ServingCost:
    """One replica of `tp` devices. Everything but `speed` and capacities is in the pair's own tokens."""

    architecture: Architecture
    hardware: Hardware
    tp: int
    max_running: int
    token_scale: int = 1
    host_factor: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.architecture.name} on {self.tp} x {self.hardware.name}"

    @property
    def devices(self) -> int:
        return self.tp

    @cached_property
    def forward(self) -> Forward:
        host = engines()[ENGINE].scaled(self.host_factor)
        return Forward(self.architecture, kernels_of(self.hardware), host, self.tp)

    @cached_property
    def tables(self) -> StepTables:
        return StepTables(self.forward, self.max_running, TOKEN_BUDGET)

    def costs(self) -> Costs:
        return self.tables.costs()

    def bounds(self) -> Bounds:
        return Bounds(self.max_running, TOKEN_BUDGET, self._blocks)

    @cached_property
    def _blocks(self) -> int:
        return kv_blocks(self.architecture, self.hardware, self.tp, max_running=self.max_running)

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


@dataclass(frozen=True)
class TrainingCost:
    """The training unit: forward and backward over all tokens, a log-probability pass, the optimizer."""

    architecture: Architecture
    hardware: Hardware
    control_s: float  # of an optimizer step, beside what it reads and writes
    flop_s: float  # device-seconds a FLOP, see `seconds_a_flop`
    stages: int = 1  # of a pipeline; 1 is sharded data parallelism
    width: int = 1  # tensor parallelism of a pipeline's stage
    mini_batch_samples: int = 1
    token_scale: int = 1

    def device_s(self, tokens: int, pairs: float) -> float:
        """Device-seconds for `tokens` with `pairs` (query, key) pairs: a forward pass for log-probabilities,
        and a forward and a backward pass (twice a forward one)."""
        flops = 4 * forward_flops(self.architecture, tokens * self.token_scale, pairs * self.token_scale**2)
        return flops * self.flop_s

    def micro_s(self, tokens: int, pairs: float, devices: int) -> float:
        """Seconds of a micro-batch that all devices share, with its part of the pipeline's bubble."""
        return self.device_s(tokens, pairs) / devices * (1 + self.bubble(devices))

    def bubble(self, devices: int) -> float:
        """Idle time of a pipeline beside its work, with one sequence a pipelined micro-batch."""
        pipelines = max(1, devices // (self.stages * self.width))
        return (self.stages - 1) * pipelines / self.mini_batch_samples

    def step_s(self, devices: int) -> float:
        """An optimizer step reads and writes all training state once."""
        moved = 2 * self.architecture.params_total * TRAIN_STATE_BYTES / devices
        return self.control_s + moved / self.hardware.memory_bytes_per_s

    @property
    def token_device_s(self) -> float:
        return self.device_s(1, 0.0)

    @property
    def optimizer_bytes(self) -> float:
        return self.architecture.params_total * OPTIMIZER_BYTES

    @property
    def smallest_unit(self) -> int:
        """Devices that the training state needs at least."""
        return train_devices(self.architecture, self.hardware)


@dataclass(frozen=True)
class ClusterCost:
    """All durations of one model group on one cluster."""

    serving: dict[Role, ServingCost]
    training: TrainingCost
    phase_s: dict[str, float]
    control_s: dict[str, float]
    gpus_per_node: int

    @property
    def token_scale(self) -> int:
        return self.training.token_scale

    @property
    def extrapolated(self) -> bool:
        return self.training.hardware.extrapolated

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

    def publish_s(self, devices: int) -> float:
        weights = self.training.architecture.params_total * BYTES_PER_PARAMETER / devices
        return self.control_s["publish"] + self.copy_s(weights, min(devices, self.gpus_per_node))

    def update_s(self) -> float:
        """With all of its node: replicas are told of a version at the same moment."""
        return self.control_s["update"] + self.copy_s(self._bytes(Role.ROLLOUT, 1), self.gpus_per_node)

    def warm_shift_s(self) -> float:
        """A typical shift into a serving role, for the planner's first estimate."""
        slowest = max(self.copy_s(self._bytes(role, 1), self.serving[role].devices) for role in self.serving)
        return sum(self.phase_s.values()) + slowest


def forward_flops(model: Architecture, tokens: float, pairs: float) -> float:
    """FLOPs of one forward pass: 2 a parameter and token; 4 a head dimension for each pair that attends."""
    return 2.0 * model.params_active * tokens + 4.0 * model.full_layers * model.heads * model.head_dim * pairs


def seconds_a_flop(hardware: Hardware, share: float) -> float:
    """Device-seconds of training a FLOP, where training on `MEASURED_ON` reaches `share` of the peak.

    GEMMs reach the kernels' share of any device's peak. What training takes beside them (links, memory, host,
    imbalance) does not hang on the peak: it takes as long here as there.
    """
    measured = load_hardware(MEASURED_ON)
    gemm: float = coefficients()["gemm"].compute
    rest = (1 / share - 1 / gemm) / measured.bf16_flops
    return 1 / (hardware.bf16_flops * gemm) + max(0.0, rest)


def cluster_cost(
    policy: Architecture, judge: Architecture, hardware: Hardware, *, policy_tp: int, judge_tp: int,
    max_running: int, gpus_per_node: int = 8, train_stages: int = 1, mini_batch_samples: int = 512,
    token_scale: int = 1, factors: Mapping[str, float] = NO_FACTORS,
) -> ClusterCost:  # fmt: skip
    """The cost model of a model group; `factors` multiply its coefficients (see `NO_FACTORS`)."""
    by = {**NO_FACTORS, **factors}
    hardware = replace(
        hardware,
        bf16_flops=hardware.bf16_flops * by["compute"],
        memory_bytes_per_s=hardware.memory_bytes_per_s * by["memory"],
        nvlink_bytes_per_s=hardware.nvlink_bytes_per_s * by["link"],
        pcie_bytes_per_s=hardware.pcie_bytes_per_s * by["link"],
        node_host_bytes_per_s=hardware.node_host_bytes_per_s * by["link"],
    )
    shift: dict[str, Any] = tomllib.loads((HERE / "shift.toml").read_text())
    trained: dict[str, dict[str, float]] = tomllib.loads((HERE / "training.toml").read_text())
    share = trained["utilisation"]["experts" if policy.experts else "dense"]
    flop_s = seconds_a_flop(hardware, share) / by["training"]
    phase_s, control_s = ({k: v * by["shift"] for k, v in shift[t].items()} for t in ("phase_s", "control_s"))
    training = TrainingCost(
        policy,
        hardware,
        control_s["optimizer"],
        flop_s,
        train_stages,
        policy_tp,
        mini_batch_samples,
        token_scale,
    )
    return ClusterCost(
        serving={
            Role.ROLLOUT: ServingCost(policy, hardware, policy_tp, max_running, token_scale, by["host"]),
            Role.REWARD: ServingCost(judge, hardware, judge_tp, max_running, token_scale, by["host"]),
        },
        training=training,
        phase_s=phase_s,
        control_s=control_s,
        gpus_per_node=gpus_per_node,
    )

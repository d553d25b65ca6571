"""How long things take on the simulated cluster: serving, training, moving parameters.

Serving is kernels and an engine's host layer (`forward.py`, fitted to public measurements). Training is FLOPs
over an assumed share of the peak; shifts are seconds and bytes (`shift.toml`). These two are provisional.

With `token_scale` s one token of a small real model stands for s tokens of the modelled pair.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from systems.backends.sim.architecture import BYTES_PER_PARAMETER, Architecture
from systems.backends.sim.forward import Forward, StepTables, engines
from systems.backends.sim.hardware import Hardware
from systems.backends.sim.kernels import kernels_of
from systems.backends.sim.memory import OPTIMIZER_BYTES, kv_blocks, train_devices, weight_bytes
from systems.backends.sim.replica import BLOCK, Bounds, Costs
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
        small, full = PLANNER_BATCH, self.max_running
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
    optimizer_s: float
    utilisation: float
    token_scale: int = 1

    def device_s(self, tokens: int) -> float:
        """Device-seconds for `tokens`: 6 + 2 FLOPs a parameter and token, over the achieved rate."""
        flops = 8.0 * self.architecture.params_active * tokens * self.token_scale
        return flops / (self.hardware.bf16_flops * self.utilisation)

    def micro_s(self, tokens: int, devices: int) -> float:
        """Seconds of a micro-batch that all devices share."""
        return self.device_s(tokens) / devices

    @property
    def token_device_s(self) -> float:
        return self.device_s(1)

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
    path: dict[str, float]
    provisional: bool = True  # training and shifts are not calibrated

    @property
    def token_scale(self) -> int:
        return self.training.token_scale

    @property
    def extrapolated(self) -> bool:
        return self.training.hardware.extrapolated

    @property
    def restart_s(self) -> float:
        return self.control_s["restart"]

    @property
    def _host_bandwidth(self) -> float:
        return self.training.hardware.pcie_bytes_per_s * self.path["host_share"]

    def phase(self, step: Step, shift: Shift) -> tuple[float, int]:
        """Seconds plus bytes over the host path; 0 s where the phase does not apply.

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
        return self.phase_s[step] + moved / self._host_bandwidth, round(moved)

    def _bytes(self, role: Role, devices: int) -> float:
        """What each device of a placement reads: a replica's parameters, or its part of the optimizer."""
        if role in SERVING:
            cost = self.serving[role]
            return weight_bytes(cost.architecture, cost.tp)
        return self.training.optimizer_bytes / devices

    def publish_s(self, devices: int) -> float:
        weights = self.training.architecture.params_total * BYTES_PER_PARAMETER / devices
        return self.control_s["publish"] + weights / self._host_bandwidth

    def update_s(self) -> float:
        return self.control_s["update"] + self._bytes(Role.ROLLOUT, 1) / self._host_bandwidth

    def warm_shift_s(self) -> float:
        """A typical shift into a serving role, for the planner's first estimate."""
        slowest = max(self._bytes(role, 1) for role in self.serving)
        return sum(self.phase_s.values()) + slowest / self._host_bandwidth


def cluster_cost(
    policy: Architecture, judge: Architecture, hardware: Hardware, *, policy_tp: int, judge_tp: int,
    max_running: int, token_scale: int = 1, factors: Mapping[str, float] = NO_FACTORS,
) -> ClusterCost:  # fmt: skip
    """The cost model of a model group; `factors` multiply its coefficients (see `NO_FACTORS`)."""
    by = {**NO_FACTORS, **factors}
    hardware = replace(
        hardware,
        bf16_flops=hardware.bf16_flops * by["compute"],
        memory_bytes_per_s=hardware.memory_bytes_per_s * by["memory"],
        nvlink_bytes_per_s=hardware.nvlink_bytes_per_s * by["link"],
        pcie_bytes_per_s=hardware.pcie_bytes_per_s * by["link"],
    )
    shift: dict[str, Any] = tomllib.loads((HERE / "shift.toml").read_text())
    utilisation: dict[str, float] = tomllib.loads((HERE / "training.toml").read_text())
    share = utilisation["moe" if policy.experts else "dense"] * by["training"]
    phase_s, control_s = ({k: v * by["shift"] for k, v in shift[t].items()} for t in ("phase_s", "control_s"))
    return ClusterCost(
        serving={
            Role.ROLLOUT: ServingCost(policy, hardware, policy_tp, max_running, token_scale, by["host"]),
            Role.REWARD: ServingCost(judge, hardware, judge_tp, max_running, token_scale, by["host"]),
        },
        training=TrainingCost(policy, hardware, control_s["optimizer"], share, token_scale),
        phase_s=phase_s,
        control_s=control_s,
        path=shift["path"],
    )

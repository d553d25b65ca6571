"""How long things take on the simulated cluster: serving, training, moving parameters.

First form: rooflines from an architecture and a hardware profile. Decoding one token for each of n
sequences with KV context tokens in all costs `alpha(n) + beta * KV` seconds; everything else is FLOPs
or bytes over a rate, plus a constant. All coefficients are TOML with their source.

With `token_scale` s one token of a small real model stands for s tokens of the modelled pair: a step
is then s decode steps, and lengths, prefill and training count s-fold.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from systems.types import SERVING, Role, Shift, Speed, Step

HERE = Path(__file__).parent
BYTES_PER_PARAMETER = 2  # bf16 in serving
TRAIN_STATE_BYTES = 16  # bf16 weights and gradients, fp32 master weights and two Adam moments
OPTIMIZER_BYTES = 12  # of these, what must survive a shift: master weights and moments
MEMORY_SHARE = 0.90  # of a device, for weights and KV cache
OVERHEAD_BYTES = 4e9  # activations, graphs and the framework on a serving device


@dataclass(frozen=True, slots=True)
class Architecture:
    """What of a model decides its cost. `kv_layers` hold a KV cache; others keep a constant state."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_layers: int
    vocab: int
    params_total: float
    params_active: float
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    state_bytes_per_sequence: float = 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.kv_layers * self.kv_heads * self.head_dim * BYTES_PER_PARAMETER

    @property
    def weight_bytes(self) -> float:
        return self.params_total * BYTES_PER_PARAMETER

    def bytes_read(self, tokens: int) -> float:
        """Weight bytes that a forward pass over `tokens` tokens reads.

        Of E experts with k a token, E * (1 - (1 - k/E)^tokens) are expected to be hit.
        """
        if not self.experts:
            return self.weight_bytes
        expert_params = self.layers * 3.0 * self.hidden * self.expert_ffn
        hit = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)
        return (self.params_total - (self.experts - hit) * expert_params) * BYTES_PER_PARAMETER


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device profile, from `hardware/*.toml`."""

    name: str
    provisional: bool
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    host_bandwidth: float
    weights_efficiency: float
    compute_efficiency: float
    attention_bandwidth: float
    train_dense: float
    train_moe: float
    step_s: float
    moe_layer_s: float
    all_reduce_s: float


def hardware_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "hardware").glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    raw = tomllib.loads((HERE / "hardware" / f"{name}.toml").read_text())
    peak, efficiency, overhead = raw["peak"], raw["efficiency"], raw["overhead"]
    return Hardware(
        name=raw["name"],
        provisional=raw["provisional"],
        flops=peak["bf16_flops"],
        memory_bandwidth=peak["memory_bytes_per_s"],
        memory_bytes=peak["memory_bytes"],
        host_bandwidth=peak["host_bytes_per_s"],
        weights_efficiency=efficiency["weights"],
        compute_efficiency=efficiency["compute"],
        attention_bandwidth=efficiency["attention_bytes_per_s"],
        train_dense=efficiency["train_dense"],
        train_moe=efficiency["train_moe"],
        step_s=overhead["step_s"],
        moe_layer_s=overhead["moe_layer_s"],
        all_reduce_s=overhead["all_reduce_s"],
    )


@dataclass(frozen=True)
class ServingCost:
    """One replica of `tp` devices. Lengths are in the workload's own tokens (see `token_scale`)."""

    architecture: Architecture
    hardware: Hardware
    tp: int
    max_running: int
    token_scale: int = 1
    _alpha: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        return f"{self.architecture.name} on {self.tp} x {self.hardware.name}"

    @property
    def devices(self) -> int:
        return self.tp

    def alpha_s(self, running: int) -> float:
        """Seconds of one decode step for `running` sequences, without reading the KV cache."""
        known = self._alpha.get(running)
        if known is None:
            known = self._alpha[running] = self.token_scale * self._step_s(running)
        return known

    def _step_s(self, running: int) -> float:
        arch = self.architecture
        read = arch.bytes_read(running) * self._read_s
        state = 2.0 * running * arch.state_bytes_per_sequence / self.hardware.memory_bandwidth
        return (max(read, running * self._compute_s) + state) / self.tp + self._overhead_s

    @cached_property
    def _read_s(self) -> float:
        """Seconds a byte of weights, on one device."""
        return 1.0 / (self.hardware.memory_bandwidth * self.hardware.weights_efficiency)

    @cached_property
    def _compute_s(self) -> float:
        """Seconds of arithmetic a token, on one device."""
        flops = self.hardware.flops * self.hardware.compute_efficiency
        return 2.0 * self.architecture.params_active / flops

    @cached_property
    def _overhead_s(self) -> float:
        arch, hw = self.architecture, self.hardware
        reduce = 2 * arch.layers * hw.all_reduce_s if self.tp > 1 else 0.0
        return hw.step_s + reduce + (arch.layers * hw.moe_layer_s if arch.experts else 0.0)

    @cached_property
    def beta_s(self) -> float:
        """Seconds a decode step spends per context token that is in the replica."""
        shards = min(self.tp, self.architecture.kv_heads)
        per_token = self.architecture.kv_bytes_per_token / shards / self.hardware.attention_bandwidth
        return per_token * self.token_scale**2

    def prefill_s(self, context_tokens: int) -> float:
        """Seconds to read `context_tokens` of new contexts into the cache."""
        tokens = context_tokens * self.token_scale
        read = self.architecture.bytes_read(tokens) * self._read_s
        return max(tokens * self._compute_s, read) / self.tp + self._overhead_s

    @cached_property
    def kv_capacity_tokens(self) -> int:
        """Context tokens that fit beside the weights; negative if the weights do not."""
        arch, hw = self.architecture, self.hardware
        per_device = hw.memory_bytes * MEMORY_SHARE - arch.weight_bytes / self.tp - OVERHEAD_BYTES
        per_device -= self.max_running * arch.state_bytes_per_sequence / self.tp
        per_token = arch.kv_bytes_per_token / min(self.tp, arch.kv_heads)
        return math.floor(per_device / per_token / self.token_scale)

    def speed(self) -> Speed:
        """The planner's throughput model of this replica: a line through a small and a full batch."""
        overhead = self.token_scale * self._overhead_s
        return Speed(
            a=self.beta_s,
            b=self.alpha_s(8) - overhead,
            c=(self.alpha_s(self.max_running) - overhead) / self.max_running,
            d=overhead,
            max_running=self.max_running,
            kv_capacity_tokens=self.kv_capacity_tokens,
            ahead=self.max_running // 32,
        )


@dataclass(frozen=True)
class TrainingCost:
    """The training unit: forward and backward over all tokens, a log-probability pass, the optimizer."""

    architecture: Architecture
    hardware: Hardware
    optimizer_s: float
    token_scale: int = 1

    def device_s(self, tokens: int) -> float:
        """Device-seconds for `tokens`: 6 + 2 FLOPs a parameter and token, over the achieved rate."""
        arch, hw = self.architecture, self.hardware
        share = hw.train_moe if arch.experts else hw.train_dense
        return 8.0 * arch.params_active * tokens * self.token_scale / (hw.flops * share)

    def micro_s(self, tokens: int, devices: int) -> float:
        """Seconds of a micro-batch that all devices share."""
        return self.device_s(tokens) / devices

    @property
    def token_device_s(self) -> float:
        return self.device_s(1)

    @property
    def state_bytes(self) -> float:
        return self.architecture.params_total * TRAIN_STATE_BYTES

    @property
    def optimizer_bytes(self) -> float:
        return self.architecture.params_total * OPTIMIZER_BYTES

    @property
    def smallest_unit(self) -> int:
        """Devices that the training state needs at least."""
        return math.ceil(self.state_bytes / (self.hardware.memory_bytes * MEMORY_SHARE))


@dataclass(frozen=True)
class ClusterCost:
    """All durations of one model group on one cluster."""

    serving: dict[Role, ServingCost]
    training: TrainingCost
    phase_s: dict[str, float]
    control_s: dict[str, float]

    @property
    def token_scale(self) -> int:
        return self.training.token_scale

    @property
    def provisional(self) -> bool:
        return self.training.hardware.provisional

    @property
    def restart_s(self) -> float:
        return self.control_s["restart"]

    @property
    def _host_bandwidth(self) -> float:
        return self.training.hardware.host_bandwidth

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
            return cost.architecture.weight_bytes / cost.tp
        return self.training.optimizer_bytes / devices

    def publish_s(self, devices: int) -> float:
        weights = self.training.architecture.weight_bytes / devices
        return self.control_s["publish"] + weights / self._host_bandwidth

    def update_s(self) -> float:
        return self.control_s["update"] + self._bytes(Role.ROLLOUT, 1) / self._host_bandwidth

    def warm_shift_s(self) -> float:
        """A typical shift into a serving role, for the planner's first estimate."""
        slowest = max(self._bytes(role, 1) for role in self.serving)
        return sum(self.phase_s.values()) + slowest / self._host_bandwidth


def cluster_cost(
    policy: Architecture, judge: Architecture, hardware: Hardware, *, policy_tp: int, judge_tp: int,
    max_running: int, token_scale: int = 1,
) -> ClusterCost:  # fmt: skip
    """The cost model of a model group."""
    raw: dict[str, Any] = tomllib.loads((HERE / "shift.toml").read_text())
    return ClusterCost(
        serving={
            Role.ROLLOUT: ServingCost(policy, hardware, policy_tp, max_running, token_scale),
            Role.REWARD: ServingCost(judge, hardware, judge_tp, max_running, token_scale),
        },
        training=TrainingCost(policy, hardware, raw["control_s"]["optimizer"], token_scale),
        phase_s=raw["phase_s"],
        control_s=raw["control_s"],
    )

"""How long training takes: FLOPs at what GEMMs reach, a rest that published steps imply, and communication.

What an optimizer step communicates does not shrink with the devices that share its work: parameters are
gathered and gradients scattered, however many take part. It is why training scales less than linearly.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.hardware import MEASURED_ON, Hardware, load_hardware
from systems.costs.kernels import fitted
from systems.costs.memory import OPTIMIZER_BYTES, SHARE, TRAIN_STATE_BYTES, train_devices

HERE = Path(__file__).parent
# Bytes of activations a token, layer and hidden value: all of a layer with flash attention, or its input only
# (source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022).
KEPT_BYTES, RECOMPUTED_BYTES = 34.0, 2.0
RECOMPUTED = (
    1.25  # a forward pass more than the log-probabilities', the forward and the backward one (of four)
)
MOST_DEVICES = 4096


@cache
def trained() -> dict[str, dict[str, float]]:
    """`training.toml`: shares of the peak, and what an optimizer step communicates."""
    return tomllib.loads((HERE / "training.toml").read_text())


@dataclass(frozen=True)
class TrainingCost:
    """The training unit: forward and backward over all tokens, a log-probability pass, the optimizer."""

    architecture: Architecture
    hardware: Hardware
    control_s: float  # of an optimizer step, beside what it reads and writes
    flop_s: float  # device-seconds a FLOP, see `seconds_a_flop`
    byte_s: float = (
        0.0  # of communication a byte of gathered parameters and optimizer step, on several devices
    )
    stages: int = 1  # of a pipeline; 1 is sharded data parallelism
    width: int = 1  # tensor parallelism of a pipeline's stage
    mini_batch_samples: int = 1
    token_scale: int = 1
    sequence_tokens: int = 0  # of the longest sequence, whose activations must fit on its stage's devices

    def device_s(self, tokens: int, pairs: float) -> float:
        """Device-seconds for `tokens` with `pairs` (query, key) pairs: a forward pass for log-probabilities,
        and a forward and a backward pass (twice a forward one)."""
        flops = 4 * forward_flops(self.architecture, tokens * self.token_scale, pairs * self.token_scale**2)
        return flops * self.flop_s

    def micro_s(self, tokens: int, pairs: float, devices: int) -> float:
        """Seconds of a micro-batch that all devices share, with its part of the pipeline's bubble."""
        again = RECOMPUTED if self.recomputes(devices) else 1.0
        return self.device_s(tokens, pairs) * again / devices * (1 + self.bubble(devices))

    def activation_bytes(self, layer_values: float) -> float:
        """On a device, for the longest sequence, with so many bytes a token, layer and hidden value."""
        arch = self.architecture
        longest = self.sequence_tokens * self.token_scale
        return layer_values * longest * arch.hidden * arch.layers / (self.stages * self.width)

    def left_bytes(self, devices: int) -> float:
        """Memory of a device beside the training state, where `devices` share that."""
        state = self.architecture.params_total * TRAIN_STATE_BYTES / devices
        return self.hardware.memory_bytes * SHARE - state

    def recomputes(self, devices: int) -> bool:
        """Do activations fit only if they are computed again on the way back? That is a forward pass more."""
        return self.activation_bytes(KEPT_BYTES) > self.left_bytes(devices)

    def bubble(self, devices: int) -> float:
        """Idle time of a pipeline beside its work, with one sequence a pipelined micro-batch."""
        pipelines = max(1, devices // (self.stages * self.width))
        return (self.stages - 1) * pipelines / self.mini_batch_samples

    def step_s(self, devices: int) -> float:
        """An optimizer step reads and writes all training state once, and gathers and scatters parameters."""
        moved = 2 * self.architecture.params_total * TRAIN_STATE_BYTES / devices
        sent = self.architecture.gathered_params * BYTES_PER_PARAMETER / (self.stages * self.width)
        return (
            self.control_s + moved / self.hardware.memory_bytes_per_s + sent * self.byte_s * (1 - 1 / devices)
        )

    @property
    def token_device_s(self) -> float:
        return self.device_s(1, 0.0)

    @property
    def optimizer_bytes(self) -> float:
        return self.architecture.params_total * OPTIMIZER_BYTES

    @property
    def smallest_unit(self) -> int:
        """Devices that the training state needs at least, and the activations of the longest sequence."""
        least = train_devices(self.architecture, self.hardware)
        while least < MOST_DEVICES and self.left_bytes(least) < self.activation_bytes(RECOMPUTED_BYTES):
            least += 1
        return least


def forward_flops(model: Architecture, tokens: float, pairs: float) -> float:
    """FLOPs of one forward pass: 2 a parameter and token; 4 a head dimension for each pair that attends."""
    return 2.0 * model.params_active * tokens + 4.0 * model.full_layers * model.heads * model.head_dim * pairs


def seconds_a_flop(hardware: Hardware, share: float) -> float:
    """Device-seconds of training a FLOP, where training on `MEASURED_ON` reaches `share` of the peak.

    GEMMs reach the kernels' share of any device's peak. What training takes beside them (links, memory, host,
    imbalance) does not hang on the peak: it takes as long here as there.
    """
    measured = load_hardware(MEASURED_ON)
    gemm: float = fitted()[MEASURED_ON]["gemm"].compute
    rest = (1 / share - 1 / gemm) / measured.bf16_flops
    return 1 / (hardware.bf16_flops * gemm) + max(0.0, rest)

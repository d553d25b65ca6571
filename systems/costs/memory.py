"""What fits on a device: weights, KV cache, optimizer state. Refusals come with the numbers."""

from __future__ import annotations

import math

from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.durations import BLOCK
from systems.costs.hardware import Hardware

MEMORY_SHARE = 0.90  # of a device, for an engine (vLLM's default) or for training
OVERHEAD_BYTES = 4e9  # activations, graphs and the framework on a serving device
TRAIN_STATE_BYTES = (
    16  # a parameter in training: bf16 weights and gradients, fp32 master weights, two moments
)
OPTIMIZER_BYTES = 12  # of these, what must survive a shift: master weights and moments


def weight_bytes(model: Architecture, tp: int, expert_ranks: int = 1) -> float:
    """On each device of a replica."""
    experts = model.moe_layers * model.experts * model.expert_params * BYTES_PER_PARAMETER
    return (model.weight_bytes - experts * (1 - 1 / expert_ranks)) / tp


def kv_bytes(
    model: Architecture, hardware: Hardware, tp: int, max_running: int, expert_ranks: int = 1
) -> float:
    """Left for the KV cache on each device; negative if the weights do not fit."""
    states = max_running * model.state_bytes_per_sequence / tp
    weights = weight_bytes(model, tp, expert_ranks)
    return hardware.memory_bytes * MEMORY_SHARE - weights - OVERHEAD_BYTES - states


def kv_blocks(
    model: Architecture, hardware: Hardware, tp: int, expert_ranks: int = 1, max_running: int = 0
) -> int:
    """Blocks of a replica's cache. KV heads are copied where there are fewer than devices."""
    per_token = model.kv_bytes_per_token / min(tp, model.kv_heads)
    return math.floor(kv_bytes(model, hardware, tp, max_running, expert_ranks) / per_token / BLOCK)


def train_devices(model: Architecture, hardware: Hardware) -> int:
    """Devices that the training state needs at least."""
    return math.ceil(model.params_total * TRAIN_STATE_BYTES / (hardware.memory_bytes * MEMORY_SHARE))

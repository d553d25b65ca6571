"""What fits on a device: weights, KV cache, optimizer state. Refusals come with the numbers.

    KV cache = share * usable - weights - activations - communicators - graphs        (a device of a replica)

`usable` is what the driver leaves to a process. Activations are mostly those of the engine's dummy run at
start: `sampler` values of 4 bytes for each sequence and word of the vocabulary, and a step's tokens. The form
and its constants explain what vLLM reports at start (public logs of versions 0.2 to 0.27) to half a GiB;
`bench validate` holds them against reported capacities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.durations import BLOCK
from systems.costs.hardware import Hardware

GIB = 2.0**30
SHARE = 0.90  # of a device, for an engine (vLLM's default) or for training
HIDDEN_COPIES = 1.2  # activations of a step: so many times its tokens' hidden states
LEAST_ACTIVATIONS = 0.4 * GIB
EXPERTS_MORE = 0.4 * GIB
LONE, LINKED, BUSED = 0.19 * GIB, 1.2 * GIB, 0.3 * GIB  # communicators: one device, over NVLink, over PCIe
TRAIN_STATE_BYTES = (
    16  # a parameter in training: bf16 weights and gradients, fp32 master weights, two moments
)
OPTIMIZER_BYTES = 12  # of these, what must survive a shift: master weights and moments


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """How an engine is configured, and what its version takes beside weights and KV cache."""

    share: float = SHARE
    max_running: int = 256
    token_budget: int = 8192
    sampler: float = 9.5  # values a sequence and word of the vocabulary
    graphs_bytes: float = 0.0
    overhead: float = 1.0  # a factor on all that is not weights or KV cache

    def overhead_bytes(self, model: Architecture, hardware: Hardware, tp: int) -> float:
        """Everything on a device but weights and KV cache."""
        sampled = self.sampler * 4 * self.max_running * model.vocab
        step = HIDDEN_COPIES * 2 * self.token_budget * model.hidden
        activations = max(LEAST_ACTIVATIONS, sampled + step) + (EXPERTS_MORE if model.experts else 0.0)
        joined = LINKED if hardware.nvlink_bytes_per_s else BUSED
        return self.overhead * (activations + (joined if tp > 1 else LONE) + self.graphs_bytes)


def weight_bytes(model: Architecture, tp: int, expert_ranks: int = 1) -> float:
    """On each device of a replica."""
    experts = model.moe_layers * model.experts * model.expert_params * BYTES_PER_PARAMETER
    return (model.weight_bytes - experts * (1 - 1 / expert_ranks)) / tp


def kv_bytes(
    model: Architecture, hardware: Hardware, tp: int, engine: EngineMemory, expert_ranks: int = 1
) -> float:
    """Left for the KV cache on each device; negative if the weights do not fit."""
    weights = weight_bytes(model, tp, expert_ranks)
    return hardware.memory_bytes * engine.share - weights - engine.overhead_bytes(model, hardware, tp)


def kv_token_bytes(model: Architecture, tp: int) -> float:
    """A context token on each device, which holds whole KV heads: copies where there are too few."""
    heads = math.ceil(model.kv_heads / min(tp, model.kv_heads)) if model.kv_heads else 0
    return model.kv_bytes_per_token * heads / max(1, model.kv_heads)


def kv_blocks(
    model: Architecture, hardware: Hardware, tp: int, engine: EngineMemory, expert_ranks: int = 1
) -> int:
    """Blocks of a replica's cache."""
    left = kv_bytes(model, hardware, tp, engine, expert_ranks)
    return math.floor(left / kv_token_bytes(model, tp) / BLOCK)


def state_blocks(model: Architecture, tp: int) -> int:
    """Blocks that the state of one sequence's linear attention takes, as long as it is there."""
    return math.ceil(model.state_bytes_per_sequence / tp / kv_token_bytes(model, tp) / BLOCK)


def train_devices(model: Architecture, hardware: Hardware) -> int:
    """Devices that the training state needs at least."""
    return math.ceil(model.params_total * TRAIN_STATE_BYTES / (hardware.memory_bytes * SHARE))

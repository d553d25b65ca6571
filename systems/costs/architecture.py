"""What of a language model decides its cost, from its public configuration.

A model is layers of attention and feed-forward. Attention is full (grouped queries, a KV cache) or linear
(a constant state a sequence); feed-forward is dense, or routed experts with shared ones beside them.
Parameter counts follow from the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES_PER_PARAMETER = 2  # bf16


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes. `ffn` is the width of dense feed-forward layers, `shared_ffn` of the experts that every token
    takes. `linear_*` describe linear-attention layers (gated delta rule)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # of a model with experts, the first ones that have none
    linear_layers: int = 0
    linear_key_heads: int = 0
    linear_key_dim: int = 0
    linear_value_heads: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    output_gate: bool = False  # the query projection also makes a gate for the output
    tied: bool = False  # one matrix for embedding and head
    plain_ffn: bool = False  # feed-forward parts of two matrices, not gated ones of three
    tower_params: float = 0.0  # of a vision tower, which takes memory and is not charged for otherwise

    @property
    def full_layers(self) -> int:
        """Layers with a KV cache."""
        return self.layers - self.linear_layers

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def ffn_layers(self) -> int:
        """Layers with a dense feed-forward part."""
        return self.layers - self.moe_layers

    # Widths of projections, before any sharding.

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim * (2 if self.output_gate else 1)

    @property
    def qkv_width(self) -> int:
        return self.query_width + 2 * self.kv_heads * self.head_dim

    @property
    def linear_in_width(self) -> int:
        """Queries, keys, values, gate, and two scalars a value head."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_values
        return 2 * keys + 2 * values + 2 * self.linear_value_heads

    @property
    def linear_values(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    # What follows from the shapes.

    @property
    def attention_params(self) -> float:
        """All layers' projections."""
        full = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        channels = 2 * self.linear_key_heads * self.linear_key_dim + self.linear_values
        linear = self.hidden * (self.linear_in_width + self.linear_values) + channels * self.linear_conv
        return float(self.full_layers * full + self.linear_layers * linear)

    @property
    def expert_params(self) -> float:
        """One expert of one layer."""
        return float(self.ffn_matrices * self.hidden * self.expert_ffn)

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward part: gate, up and down, or up and down."""
        return 2 if self.plain_ffn else 3

    @property
    def always_params(self) -> float:
        """What every token passes, without embedding and head."""
        dense = (
            self.ffn_matrices * self.hidden * (self.ffn_layers * self.ffn + self.moe_layers * self.shared_ffn)
        )
        router = float(self.moe_layers * self.hidden * self.experts)
        return self.attention_params + dense + router

    @property
    def head_params(self) -> float:
        return float(self.vocab * self.hidden)

    @property
    def params_total(self) -> float:
        """Without norms and biases (below 0.1 %)."""
        tables = self.head_params * (1 if self.tied else 2)
        experts = self.moe_layers * self.experts * self.expert_params
        return self.always_params + tables + experts + self.tower_params

    @property
    def gathered_params(self) -> float:
        """What sharded training gathers and scatters: all but experts, which stay where they are while tokens
        come to them."""
        return self.params_total - self.moe_layers * self.experts * self.expert_params

    @property
    def params_active(self) -> float:
        """What one token uses; the embedding's row counts as its table, as is usual."""
        tables = self.head_params * (1 if self.tied else 2)
        return self.always_params + tables + self.moe_layers * self.experts_per_token * self.expert_params

    @property
    def tensors(self) -> int:
        """Parameter tensors as a checkpoint names them; those without a matrix are taken for five a layer."""
        experts = self.moe_layers * (3 * self.experts + 1 + (3 if self.shared_ffn else 0))
        return self.layers * (4 + 5) + self.ffn_layers * 3 + experts + 3

    @property
    def weight_bytes(self) -> float:
        return self.params_total * BYTES_PER_PARAMETER

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.full_layers * self.kv_heads * self.head_dim * BYTES_PER_PARAMETER

    @property
    def state_bytes_per_sequence(self) -> float:
        """The state that linear attention keeps of a sequence: a matrix a value head, in fp32."""
        return 4.0 * self.linear_layers * self.linear_values * self.linear_key_dim


def distinct_experts(experts: int, per_token: int, tokens: Any, skew: float = 0.0) -> Any:
    """Experts that `tokens` tokens are expected to hit, each choosing `per_token` of them.

    With `skew` 0 all are as popular; else the i-th most popular one is asked for as often as i^-skew says.
    """
    if not skew:
        return experts * (1.0 - (1.0 - per_token / experts) ** tokens)
    chosen = _popularity(experts, per_token, skew)
    return (1.0 - (1.0 - chosen) ** np.asarray(tokens, dtype=np.float64)[..., None]).sum(-1)


@cache
def _popularity(experts: int, per_token: int, skew: float) -> NDArray[np.float64]:
    """How likely a token is to choose each expert; these add up to `per_token`."""
    weight = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    low, high = 0.0, 1.0
    while (1.0 - np.exp(-high * weight)).sum() < per_token:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = (1.0 - np.exp(-middle * weight)).sum() >= per_token
        low, high = (low, middle) if enough else (middle, high)
    return np.asarray(1.0 - np.exp(-high * weight))

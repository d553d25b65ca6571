"""What of a language model decides its cost, from its public configuration.

A model is layers of attention and feed-forward. Attention is full (grouped queries, a KV cache) or linear
(a constant state a sequence); feed-forward is dense, or routed experts with shared ones beside them.
Parameter counts follow from the shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_PARAMETER = 2  # bf16


class ArchitectureError(ValueError):
    """A configuration that says too little, or something that is not modelled."""


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
        return 3.0 * self.hidden * self.expert_ffn

    @property
    def always_params(self) -> float:
        """What every token passes, without embedding and head."""
        dense = 3.0 * self.hidden * (self.ffn_layers * self.ffn + self.moe_layers * self.shared_ffn)
        router = float(self.moe_layers * self.hidden * self.experts)
        return self.attention_params + dense + router

    @property
    def head_params(self) -> float:
        return float(self.vocab * self.hidden)

    @property
    def params_total(self) -> float:
        """Without norms and biases (below 0.1 %)."""
        tables = self.head_params * (1 if self.tied else 2)
        return self.always_params + tables + self.moe_layers * self.experts * self.expert_params

    @property
    def params_active(self) -> float:
        """What one token uses; the embedding's row counts as its table, as is usual."""
        tables = self.head_params * (1 if self.tied else 2)
        return self.always_params + tables + self.moe_layers * self.experts_per_token * self.expert_params

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


def distinct_experts(experts: int, per_token: int, tokens: Any) -> Any:
    """Experts that `tokens` tokens are expected to hit, each choosing `per_token` of them evenly."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def read_config(path: Path) -> Architecture:
    """An architecture from a Hugging Face `config.json`. Raises `ArchitectureError`."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ArchitectureError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ArchitectureError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ArchitectureError(f"{path}: not a JSON object")
    try:
        return from_config(raw, path.parent.name or path.stem)
    except ArchitectureError as error:
        raise ArchitectureError(f"{path}: {error}") from None


def from_config(raw: Mapping[str, Any], name: str) -> Architecture:
    """From the fields of a `config.json`; those of the language model, where there is more to it."""
    config = raw.get("text_config", raw)

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if config.get(key) is not None:
                value = config[key]
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ArchitectureError(f"field '{key}' is {value!r}, not a count")
                return value
        if default is None:
            raise ArchitectureError(f"field '{keys[0]}' is missing")
        return default

    _refuse(config)
    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    if min(layers, hidden, heads) == 0:
        raise ArchitectureError("num_hidden_layers, hidden_size and num_attention_heads must be positive")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    expert_ffn = number("moe_intermediate_size") if experts else 0
    shared = number("shared_expert_intermediate_size", default=0) if experts else 0
    shared = shared or number("n_shared_experts", default=0) * expert_ffn
    linear = _linear_layers(config, layers)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        vocab=number("vocab_size"),
        ffn=number("intermediate_size", default=None if not experts else 0),
        experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=number("first_k_dense_replace", default=0) if experts else 0,
        linear_layers=linear,
        linear_key_heads=number("linear_num_key_heads") if linear else 0,
        linear_key_dim=number("linear_key_head_dim") if linear else 0,
        linear_value_heads=number("linear_num_value_heads") if linear else 0,
        linear_value_dim=number("linear_value_head_dim") if linear else 0,
        linear_conv=number("linear_conv_kernel_dim", default=4) if linear else 0,
        output_gate=bool(config.get("attn_output_gate", linear > 0)),
        tied=bool(raw.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )


def _refuse(config: Mapping[str, Any]) -> None:
    """What would be charged wrongly, silently."""
    for field, what in (
        ("kv_lora_rank", "compressed attention"),
        ("quantization_config", "quantised weights"),
        ("mlp_only_layers", "experts in some layers only"),
    ):
        if config.get(field):
            raise ArchitectureError(f"field '{field}': {what} is not modelled")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ArchitectureError("field 'decoder_sparse_step': experts in some layers only is not modelled")
    if config.get("use_sliding_window"):
        raise ArchitectureError("field 'use_sliding_window': sliding attention is not modelled")


def _linear_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"full_attention", "linear_attention"}
        strange = sorted(set(kinds) - known)
        if strange:
            raise ArchitectureError(f"layer_types has '{strange[0]}', which is not modelled")
        return sum(kind == "linear_attention" for kind in kinds)
    interval = config.get("full_attention_interval")
    return layers - layers // interval if interval else 0

"""Architecture of a small real model, read from a standard Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class ModelConfigError(ValueError):
    """A checkpoint directory that this forward pass cannot load."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Qwen3 or Qwen3-MoE decoder. `experts` is 0 for a dense model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    rope_theta: float
    rms_eps: float = 1e-6
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    router_aux_coef: float = 0.0
    pad_id: int = 0
    eos_id: int = 0

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


def load_config(directory: Path) -> ModelConfig:
    """Read `directory/config.json`; raises `ModelConfigError` that names what is missing."""
    path = directory / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{path}: cannot be read as JSON: {error}") from None
    name = (raw.get("architectures") or ["(none)"])[0]
    if name not in ARCHITECTURES:
        raise ModelConfigError(f"{path}: architecture {name} is not one of {', '.join(ARCHITECTURES)}")
    moe = name == "Qwen3MoeForCausalLM"

    def field(key: str) -> Any:
        if key not in raw:
            raise ModelConfigError(f"{path}: field '{key}' is missing")
        return raw[key]

    if raw.get("tie_word_embeddings"):
        raise ModelConfigError(f"{path}: tied embeddings are not supported by the small engine")
    if moe and not raw.get("norm_topk_prob", False):
        raise ModelConfigError(f"{path}: norm_topk_prob = false is not supported")
    rope = raw.get("rope_parameters") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ModelConfigError(f"{path}: field 'rope_theta' is missing")
    return ModelConfig(
        vocab=field("vocab_size"),
        hidden=field("hidden_size"),
        layers=field("num_hidden_layers"),
        heads=field("num_attention_heads"),
        kv_heads=field("num_key_value_heads"),
        head_dim=field("head_dim"),
        ffn=field("intermediate_size"),
        max_positions=field("max_position_embeddings"),
        rope_theta=float(theta),
        rms_eps=float(field("rms_norm_eps")),
        experts=field("num_experts") if moe else 0,
        experts_per_token=field("num_experts_per_tok") if moe else 0,
        expert_ffn=field("moe_intermediate_size") if moe else 0,
        router_aux_coef=float(raw.get("router_aux_loss_coef", 0.0)) if moe else 0.0,
        pad_id=raw.get("pad_token_id") or 0,
        eos_id=field("eos_token_id"),
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers and vLLM read back as the same model."""
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[1] if config.is_moe else ARCHITECTURES[0]],
        "model_type": "qwen3_moe" if config.is_moe else "qwen3",
        "dtype": "float32",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": config.rms_eps,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_sliding_window": False,
        "sliding_window": None,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "bos_token_id": None,
    }
    if config.is_moe:
        raw |= {
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "router_aux_loss_coef": config.router_aux_coef,
            "output_router_logits": False,
        }
    return raw

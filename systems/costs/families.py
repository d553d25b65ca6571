"""Architectures from a Hugging Face `config.json`, by families that are known: all others are refused by
name.

A family says which fields decide its shapes, what a field that is not there means, and what of it is not
modelled. A field that no family here knows and that is set to something is refused, because it may change the
shapes; fields that change no shape are listed once (`HARMLESS`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systems.costs.architecture import Architecture


class ArchitectureError(ValueError):
    """A configuration that says too little, or something that is not modelled."""


MODALITIES = ("text_config", "llm_config")  # where the language model of a larger one is described
NAME_TOLERANCE = 0.25  # of the parameters that a name says; names round, and count embeddings or do not

# Fields that change neither shapes nor what is read or computed for a token.
HARMLESS = frozenset([
    "_name_or_path", "_attn_implementation_autoset", "architectures",
    "attention_dropout", "attn_implementation", "auto_map",
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "embd_pdrop", "resid_pdrop",
    "hidden_dropout", "attention_probs_dropout_prob", "residual_dropout", "embedding_dropout",
    "classifier_dropout", "hidden_act", "hidden_activation", "activation_function", "initializer_range",
    "layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "max_position_embeddings",
    "max_sequence_length", "seq_length", "model_max_length", "max_window_layers", "model_type",
    "original_max_position_embeddings", "output_router_logits", "output_attentions", "output_hidden_states",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor",
    "rotary_dim", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef",
    "tie_word_embeddings", "transformers_version", "use_cache", "use_qk_norm", "qk_layernorm", "qk_norm",
    "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "topk_method", "scoring_func",
    "num_nextn_predict_layers", "use_mtp", "num_mtp_modules", "mtp_transformer_layers",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "attention_bias", "mlp_bias", "use_bias",
    "bias", "add_bias_linear", "add_qkv_bias", "qkv_bias", "bos_token", "pretraining_tp",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
    "logits_soft_cap", "num_key_value_groups", "head_dtype", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "cache_implementation", "use_rmsnorm",
    "normalization_type", "mlp_type", "norm_type", "use_routing_bias", "image_token_id", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "language_model_only", "mamba_ssm_dtype",
    "unsloth_fixed", "unsloth_version", "moe_capacity", "moe_aux_loss_coef", "moe_use_aux_free",
    "moe_norm_min", "moe_gate", "moe_use_hard_gate", "use_recompute", "tensor_parallel_degree", "fuse_rope",
    "ernie_scaling", "moe_dense_experts_token_type_id", "moe_use_size_all2all", "multi_token_pred_lambda",
    "enable_mtp_magic_send", "compression_ratio", "ignored_index", "weight_share_add_bias", "rope_3d",
    "shared_moe_mode", "layernorm_full_attention_beta", "layernorm_mlp_beta",
    "layernorm_linear_attention_beta", "postnorm", "clip_qkv", "is_encoder_decoder", "problem_type",
    "chunk_size_feed_forward", "id2label", "label2id", "return_dict", "sep_token_id",
    "task_specific_params",
])  # fmt: skip

SHAPES = frozenset([
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts", "num_experts_per_tok", "moe_k", "moe_topk", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts",
    "first_k_dense_replace", "moe_layer_start_index", "moe_layer_interval", "decoder_sparse_step",
    "mlp_only_layers", "layer_types", "linear_num_key_heads", "linear_key_head_dim",
    "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim", "attn_output_gate",
    "sliding_window", "use_sliding_window", "quantization_config", "kv_lora_rank", "text_config",
    "vision_config", "moe_layer_freq", "attn_type_list", "full_attention_interval", "moe_layer_end_index",
])  # fmt: skip

REFUSED = {  # model types that are known, and why they are not charged
    "gpt_oss": "every second layer slides a window of 128 tokens, which is not modelled",
    "gemma2": "every second layer slides a window, which is not modelled",
    "gemma3": "five of six layers slide a window, which is not modelled",
    "gemma3_text": "five of six layers slide a window, which is not modelled",
    "gemma3n": "sliding windows and shared KV caches are not modelled",
    "llama4": "three of four layers attend within chunks, which is not modelled",
    "llama4_text": "three of four layers attend within chunks, which is not modelled",
    "deepseek_v2": "compressed attention (MLA) is not modelled",
    "deepseek_v3": "compressed attention (MLA) is not modelled",
    "kimi_k2": "compressed attention (MLA) is not modelled",
    "nemotron_h": "state-space layers (Mamba) are not modelled",
    "bamba": "state-space layers (Mamba) are not modelled",
    "jamba": "state-space layers (Mamba) are not modelled",
    "mamba": "state-space layers (Mamba) are not modelled",
    "mamba2": "state-space layers (Mamba) are not modelled",
    "falcon_h1": "state-space layers (Mamba) are not modelled",
    "granitemoehybrid": "state-space layers (Mamba) are not modelled",
    "minimax": "lightning attention is not modelled",
    "minimax_text_01": "lightning attention is not modelled",
    "minimax_m1": "lightning attention is not modelled",
    "cohere2": "three of four layers slide a window, which is not modelled",
    "falcon": "parallel attention with one KV head is not modelled",
}


@dataclass(frozen=True)
class Family:
    """What a model type's fields mean where they are not given.

    `plain` is a feed-forward part of two matrices instead of three; `experts_as_wide` takes the width of
    experts from `intermediate_size`.
    """

    tied: bool = False
    plain: bool = False
    experts_as_wide: bool = False
    window: int | None = None  # that an absent `sliding_window` means
    windows_need_asking: bool = False  # `sliding_window` counts only with `use_sliding_window`
    head_dim: int | None = None
    gate: bool = False  # the query projection also makes a gate for the output


DENSE, TIED = Family(), Family(tied=True)
QWEN = Family(windows_need_asking=True)
FAMILIES: dict[str, Family] = {
    "llama": DENSE, "qwen2": QWEN, "qwen3": Family(windows_need_asking=True, head_dim=128),
    "qwen2_moe": QWEN, "qwen3_moe": QWEN, "qwen3_next": Family(gate=True, windows_need_asking=True),
    "qwen3_5": Family(gate=True), "qwen3_5_text": Family(gate=True), "qwen3_5_moe": Family(gate=True),
    "qwen3_5_moe_text": Family(gate=True), "qwen2_5_vl": QWEN, "qwen2_5_vl_text": QWEN, "qwen3_vl": QWEN,
    "qwen3_vl_text": QWEN, "qwen3_vl_moe": QWEN, "qwen3_vl_moe_text": QWEN,
    "mistral": Family(window=4096), "ministral": Family(), "mistral3": Family(),
    "mixtral": Family(experts_as_wide=True), "gemma": Family(tied=True, head_dim=256),
    "glm": DENSE, "glm4": DENSE, "glm4_moe": DENSE, "phi": Family(plain=True), "phi3": DENSE,
    "ernie4_5": TIED, "ernie4_5_moe": TIED, "minimax_m2": Family(experts_as_wide=True),
    "starcoder2": Family(tied=True, plain=True, window=4096), "granite": DENSE, "olmo": DENSE, "olmo2": DENSE,
    "seed_oss": DENSE, "smollm3": TIED, "dots1": DENSE, "internlm3": DENSE, "cohere": TIED, "exaone": DENSE,
}  # fmt: skip


def read_config(path: Path) -> Architecture:
    """An architecture from a Hugging Face `config.json`. Raises `ArchitectureError`."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ArchitectureError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArchitectureError(f"{path}: not text") from None
    except json.JSONDecodeError as error:
        raise ArchitectureError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ArchitectureError(f"{path}: not a JSON object")
    name = path.parent.name or path.stem
    try:
        if (path.parent / "hf_quant_config.json").is_file():
            raise ArchitectureError("quantised weights (hf_quant_config.json beside it) are not modelled")
        found = from_config(raw, name)
        check_name(found)
        return found
    except ArchitectureError as error:
        raise ArchitectureError(f"{path}: {error}") from None


def from_config(raw: Mapping[str, Any], name: str) -> Architecture:
    """From the fields of a `config.json`. Raises `ArchitectureError`."""
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ArchitectureError("field 'model_type' is missing: it says what the others mean")
    config = next((raw[key] for key in MODALITIES if isinstance(raw.get(key), Mapping)), raw)
    inner = config.get("model_type", kind)
    for one in (kind, inner):
        if one in REFUSED:
            raise ArchitectureError(f"model type '{one}': {REFUSED[one]}")
    if inner not in FAMILIES:
        near = difflib.get_close_matches(str(inner), FAMILIES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ArchitectureError(f"model type '{inner}' is not known{hint}")
    for extra in ("audio_config", "speech_config"):
        if raw.get(extra):
            raise ArchitectureError(f"field '{extra}': an audio tower is not modelled")
    return _shapes(raw, config, FAMILIES[inner], name)


def _shapes(raw: Mapping[str, Any], config: Mapping[str, Any], family: Family, name: str) -> Architecture:
    _refuse(config, family)
    number = _reader(config)
    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    if min(layers, hidden, heads) == 0:
        raise ArchitectureError("num_hidden_layers, hidden_size and num_attention_heads must be positive")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
    wide = (
        ("moe_intermediate_size", "intermediate_size")
        if family.experts_as_wide
        else ("moe_intermediate_size",)
    )
    expert_ffn = number(*wide) if experts else 0
    shared = number("shared_expert_intermediate_size", default=0) if experts else 0
    many = number("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", default=0)
    linear = _linear_layers(config, layers)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=family.head_dim or hidden // heads),
        vocab=number("vocab_size"),
        ffn=number("intermediate_size", default=None if not experts else 0),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", "moe_k", "moe_topk") if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared or many * expert_ffn,
        dense_layers=number("first_k_dense_replace", "moe_layer_start_index", default=0) if experts else 0,
        linear_layers=linear,
        linear_key_heads=number("linear_num_key_heads") if linear else 0,
        linear_key_dim=number("linear_key_head_dim") if linear else 0,
        linear_value_heads=number("linear_num_value_heads") if linear else 0,
        linear_value_dim=number("linear_value_head_dim") if linear else 0,
        linear_conv=number("linear_conv_kernel_dim", default=4) if linear else 0,
        output_gate=bool(config.get("attn_output_gate", family.gate and linear > 0)),
        tied=bool(raw.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))),
        plain_ffn=family.plain,
        tower_params=_vision_params(raw.get("vision_config"), hidden),
    )


def _reader(config: Mapping[str, Any]) -> Callable[..., int]:
    """Counts from the first of several fields that is given."""

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

    return number


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    """What would be charged wrongly, silently."""
    for field, what in (
        ("kv_lora_rank", "compressed attention (MLA)"),
        ("quantization_config", "quantised weights"),
        ("mlp_only_layers", "experts in some layers only"),
    ):
        if config.get(field):
            raise ArchitectureError(f"field '{field}': {what} is not modelled")
    for field in ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"):
        if config.get(field, 1) not in (1, None):
            raise ArchitectureError(f"field '{field}': experts in some layers only is not modelled")
    last = config.get("moe_layer_end_index")
    if last not in (None, -1) and last != config.get("num_hidden_layers", 0) - 1:
        raise ArchitectureError("field 'moe_layer_end_index': experts in some layers only is not modelled")
    if set(config.get("attn_type_list") or [1]) != {1}:
        raise ArchitectureError("field 'attn_type_list': lightning attention is not modelled")
    window = config.get("sliding_window", family.window)
    if config.get("use_sliding_window") or (window and not family.windows_need_asking):
        field = "use_sliding_window" if config.get("use_sliding_window") else "sliding_window"
        raise ArchitectureError(
            f"field '{field}': sliding attention (a window of {window} tokens) is not modelled"
        )
    for field, value in config.items():
        if field not in SHAPES and field not in HARMLESS and value not in (None, False, 0, [], {}, ""):
            raise ArchitectureError(f"field '{field}' is not known, and may change the shapes")


def _linear_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"full_attention", "linear_attention", "attention"}
        strange = sorted(set(kinds) - known)
        if strange:
            raise ArchitectureError(f"layer_types has '{strange[0]}', which is not modelled")
        return sum(kind == "linear_attention" for kind in kinds)
    interval = config.get("full_attention_interval")
    return layers - layers // interval if interval else 0


def _vision_params(vision: Any, hidden: int) -> float:
    """Parameters of a vision tower as Qwen builds it: they take memory, and no time is charged for them."""
    if not vision:
        return 0.0
    number = _reader(vision)
    width, depth = number("hidden_size", "embed_dim"), number("depth", "num_hidden_layers")
    if "depth" not in vision:
        raise ArchitectureError("field 'vision_config': a vision tower of this kind is not modelled")
    matrices = 2 if vision.get("hidden_act", "silu") != "silu" else 3
    merged = width * number("spatial_merge_size", default=2) ** 2
    merger = merged * merged + merged * number("out_hidden_size", default=hidden)
    deep = len(vision.get("deepstack_visual_indexes") or ())
    patch = 3 * number("temporal_patch_size", default=2) * number("patch_size", default=16) ** 2 * width
    positions = number("num_position_embeddings", default=0) * width
    return float(
        depth * (4 * width**2 + matrices * width * number("intermediate_size"))
        + (1 + deep) * merger + patch + positions
    )  # fmt: skip


def check_name(model: Architecture) -> None:
    """Hold the parameters that a name says ("30B-A3B") against those of its shapes.

    Raises `ArchitectureError`.
    """
    if re.search(r"\d+x\d", model.name):
        return  # "8x7B" is no number of parameters
    for pattern, count, what in (
        (r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", model.params_total, "parameters"),
        (r"-A(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", model.params_active, "active parameters"),
    ):
        if said := re.search(pattern, model.name, flags=re.IGNORECASE):
            unit = {"B": 1e9, "M": 1e6}[said.group(2).upper()]
            expected = float(said.group(1)) * unit
            most = max(expected * (1 + NAME_TOLERANCE), expected + unit)  # names round down: 3.9 is "3"
            if not expected * (1 - NAME_TOLERANCE) <= count <= most:
                named = said.group(0).lstrip("-A")
                raise ArchitectureError(
                    f"its shapes give {count / 1e9:.2f} B {what}, and its name says {named}"
                )

"""Configurations by allow-list: what people use is right within 2 %, or refused with the true reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from systems.costs.families import FAMILIES, REFUSED, ArchitectureError, from_config, read_config

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip


def write(tmp_path: Path, config: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_dense_config(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, CONFIG))
    assert (model.layers, model.kv_heads, model.ffn, model.experts) == (4, 2, 512, 0)
    per_layer = 256 * (8 * 32 + 2 * 2 * 32) + 8 * 32 * 256 + 3 * 256 * 512
    assert model.params_total == 4 * per_layer + 2 * 1000 * 256


def test_a_config_with_experts_and_hybrid_attention(tmp_path: Path) -> None:
    text = CONFIG | {
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "full_attention_interval": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_num_value_heads": 4, "linear_value_head_dim": 32,
    }  # fmt: skip
    model = read_config(write(tmp_path, {"model_type": "qwen3_5_moe", "text_config": text}))
    assert (model.experts, model.shared_ffn, model.linear_layers, model.full_layers) == (16, 64, 3, 1)
    listed = {**text, "layer_types": ["linear_attention", "full_attention"] * 2}
    assert read_config(write(tmp_path, listed)).linear_layers == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({key: v for key, v in CONFIG.items() if key != "vocab_size"}, "field 'vocab_size' is missing"),
        (CONFIG | {"hidden_size": -1}, "field 'hidden_size' is -1, not a count"),
        (CONFIG | {"num_hidden_layers": "four"}, "field 'num_hidden_layers' is 'four', not a count"),
        (CONFIG | {"num_hidden_layers": 0}, "must be positive"),
        (CONFIG | {"num_experts": 8}, "field 'moe_intermediate_size' is missing"),
        (CONFIG | {"layer_types": ["mamba"]}, "layer_types has 'mamba', which is not modelled"),
        (CONFIG | {"kv_lora_rank": 512}, "field 'kv_lora_rank': compressed attention (MLA) is not modelled"),
        (CONFIG | {"quantization_config": {"bits": 8}}, "quantised weights is not modelled"),
        (CONFIG | {"decoder_sparse_step": 2}, "field 'decoder_sparse_step'"),
        (CONFIG | {"use_sliding_window": True}, "field 'use_sliding_window': sliding attention"),
        (CONFIG | {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
    ],
)
def test_bad_configs_are_one_line_with_file_and_field(config: Any, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, config)
    with pytest.raises(ArchitectureError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def config(kind: str, **fields: Any) -> dict[str, Any]:
    """Public fields; the shapes are layers, hidden, heads, KV heads, feed-forward width, vocabulary."""
    names = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    shapes = dict(zip(names, fields.pop("shapes", ()), strict=False))
    return {"model_type": kind, **shapes, **fields}


QWEN_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh",
    "num_heads": 16,
    "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
# By name: configuration, parameters and active parameters in billions (of the model cards, or counted in the
# public weights), KV bytes a token in bf16.
PUBLIC: dict[str, tuple[dict[str, Any], float, float, int]] = {
    "Mixtral-8x7B-v0.1": (
        config("mixtral", shapes=(32, 4096, 32, 8, 14336, 32000), num_local_experts=8, num_experts_per_tok=2,
               sliding_window=None, router_aux_loss_coef=0.02), 46.70, 12.88, 131_072),
    "GLM-4.5": (
        config("glm4_moe", shapes=(92, 5120, 96, 8, 12288, 151552), head_dim=128, moe_intermediate_size=1536,
               n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
               num_nextn_predict_layers=1, attention_bias=True, use_qk_norm=True), 355.0, 33.6, 376_832),
    "GLM-4.5-Air": (
        config("glm4_moe", shapes=(46, 4096, 96, 8, 10944, 151552), head_dim=128, moe_intermediate_size=1408,
               n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1),
        106.85, 13.4, 188_416),
    "MiniMax-M2": (
        config("minimax_m2", shapes=(62, 3072, 48, 8, 1536, 200064), head_dim=128, num_local_experts=256,
               num_experts_per_tok=8, attn_type_list=[1] * 62, use_qk_norm=True, use_routing_bias=True,
               num_mtp_modules=3, scoring_func="sigmoid"), 228.7, 11.0, 253_952),
    "ERNIE-4.5-21B-A3B-PT": (
        config("ernie4_5_moe", shapes=(28, 2560, 20, 4, 12288, 103424), moe_intermediate_size=1536,
               moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_layer_start_index=1,
               moe_layer_end_index=27, moe_layer_interval=1, use_bias=False), 21.83, 3.35, 57_344),
    "phi-2": (
        config("phi", shapes=(32, 2560, 32, 32, 10240, 51200), partial_rotary_factor=0.4), 2.78, 2.78,
        327_680),
    "gemma-7b": (
        config("gemma", shapes=(28, 3072, 16, 16, 24576, 256000), head_dim=256), 8.54, 8.54, 458_752),
    "Mistral-7B-v0.3": (
        config("mistral", shapes=(32, 4096, 32, 8, 14336, 32768), sliding_window=None), 7.25, 7.25, 131_072),
    "Qwen3-VL-8B-Instruct": (
        {"model_type": "qwen3_vl", "vision_config": QWEN_VISION, "image_token_id": 1,
         "text_config": config("qwen3_vl_text", shapes=(36, 4096, 32, 8, 12288, 151936), head_dim=128)},
        8.77, 8.19, 147_456),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", shapes=(48, 2048, 32, 4, 6144, 151936), head_dim=128, num_experts=128,
               num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
               mlp_only_layers=[], use_sliding_window=False, sliding_window=None), 30.53, 3.35, 98_304),
    "Qwen3-Next-80B-A3B": (
        config("qwen3_next", shapes=(48, 2048, 16, 2, 5120, 151936), head_dim=256, num_experts=512,
               num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
               full_attention_interval=4, linear_num_key_heads=16, linear_key_head_dim=128,
               linear_num_value_heads=32, linear_value_head_dim=128, linear_conv_kernel_dim=4,
               decoder_sparse_step=1, mlp_only_layers=[], partial_rotary_factor=0.25), 79.67, 3.87, 24_576),
    "Llama-3.1-8B": (
        config("llama", shapes=(32, 4096, 32, 8, 14336, 128256)), 8.03, 8.03, 131_072),
    "granite-3.1-8b-instruct": (
        config("granite", shapes=(40, 4096, 32, 8, 12800, 49155), tie_word_embeddings=True,
               embedding_multiplier=12.0, logits_scaling=16.0), 8.17, 8.17, 163_840),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_what_people_use_is_right(name: str, tmp_path: Path) -> None:
    raw, total, active, kv_bytes = PUBLIC[name]
    (tmp_path / name).mkdir()
    model = read_config(write(tmp_path / name, raw))
    assert model.params_total / 1e9 == pytest.approx(total, rel=0.02)
    assert model.params_active / 1e9 == pytest.approx(active, rel=0.02)
    assert model.kv_bytes_per_token == pytest.approx(kv_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("gpt-oss-20b", {"model_type": "gpt_oss", "num_local_experts": 32}, "slides a window of 128 tokens"),
        ("gemma-3-27b-it", {"model_type": "gemma3", "text_config": CONFIG}, "slide a window"),
        ("gemma-2-9b", {"model_type": "gemma2"}, "slides a window"),
        ("Llama-4-Scout", {"model_type": "llama4", "text_config": CONFIG}, "within chunks"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", {"model_type": "nemotron_h"}, "state-space layers (Mamba)"),
        ("Bamba-9B", {"model_type": "bamba"}, "state-space layers (Mamba)"),
        ("MiniMax-Text-01", {"model_type": "minimax"}, "lightning attention"),
        ("DeepSeek-V3", {"model_type": "deepseek_v3"}, "compressed attention (MLA)"),
        ("Mistral-7B-v0.1", config("mistral", shapes=(32, 4096, 32, 8, 14336, 32000)), "a window of 4096"),
        ("starcoder2-15b", config("starcoder2", shapes=(40, 6144, 48, 4, 24576, 49152), sliding_window=4096),
         "field 'sliding_window'"),
        ("Qwen3-30B-A3B-FP8", PUBLIC["Qwen3-30B-A3B"][0] | {"quantization_config": {"quant_method": "fp8"}},
         "quantised weights"),
        ("x", {"model_type": "qwen4"}, "model type 'qwen4' is not known; did you mean 'qwen"),
        ("x", CONFIG | {"attention_sinks": 4}, "field 'attention_sinks' is not known, and may change"),
        ("x", CONFIG | {"model_type": None}, "'model_type' is missing"),
        ("x", {"model_type": "mistral3", "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
               "text_config": CONFIG}, "a vision tower of this kind is not modelled"),
        ("Some-30B", CONFIG, "its shapes give 0.00 B parameters, and its name says 30B"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_with_the_true_reason(
    name: str, raw: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    path = write(tmp_path / name, raw)
    with pytest.raises(ArchitectureError) as error:
        read_config(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_are_quantised_beside_the_config_are_refused(tmp_path: Path) -> None:
    """As NVFP4 copies have it: the configuration itself says nothing."""
    path = write(tmp_path, CONFIG)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ArchitectureError, match=r"hf_quant_config\.json"):
        read_config(path)


def test_a_model_type_is_known_or_refused_once() -> None:
    assert not set(FAMILIES) & set(REFUSED)
    for kind, why in REFUSED.items():
        with pytest.raises(ArchitectureError) as error:
            from_config({"model_type": kind}, "x")
        assert why in str(error.value)

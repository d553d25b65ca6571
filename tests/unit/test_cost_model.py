"""Architectures, devices and forward passes: facts that must hold whatever the coefficients are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.costs.architecture import Architecture, ArchitectureError, distinct_experts, read_config
from systems.costs.forward import Forward, StepTables, engines
from systems.costs.hardware import Status, hardware_names, load_hardware, quantities
from systems.costs.kernels import coefficients, kernels_of, smooth
from systems.costs.memory import kv_blocks, train_devices
from workloads.groups import architecture

# Parameter counts, active counts and KV bytes a token of public models (their model cards and shapes).
KNOWN = {
    "Qwen2.5-1.5B": (1_543_714_304, 1_543_714_304, 28_672),
    "Qwen2.5-7B": (7_615_616_512, 7_615_616_512, 57_344),
    "Qwen2.5-72B": (72_706_203_648, 72_706_203_648, 327_680),
    "Qwen3-32B": (32_762_123_264, 32_762_123_264, 262_144),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, 98_304),
    "Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520, 192_512),
    "Llama-3.1-8B": (8_030_261_248, 8_030_261_248, 131_072),
    "GLM-Z1-9B": (9_399_951_360, 9_399_951_360, 40_960),
    "Qwen3.5-122B-A10B": (122_111_066_112, 9_770_827_776, 24_576),
}
CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_follow_from_shapes(name: str) -> None:
    model, (total, active, kv_bytes) = architecture(name), KNOWN[name]
    assert model.params_total == pytest.approx(total, rel=2e-4)
    assert model.params_active == pytest.approx(active, rel=2e-4)
    assert model.kv_bytes_per_token == kv_bytes


def test_linear_attention_keeps_a_constant_state() -> None:
    model = architecture("Qwen3.5-122B-A10B")
    assert (model.full_layers, model.linear_layers) == (12, 36)
    assert model.state_bytes_per_sequence == 150_994_944


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
    model = read_config(write(tmp_path, {"model_type": "wrapped", "text_config": text}))
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
        (CONFIG | {"kv_lora_rank": 512}, "field 'kv_lora_rank': compressed attention is not modelled"),
        (CONFIG | {"quantization_config": {"bits": 8}}, "quantised weights is not modelled"),
        (CONFIG | {"decoder_sparse_step": 2}, "field 'decoder_sparse_step'"),
        (CONFIG | {"use_sliding_window": True}, "sliding attention is not modelled"),
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


@pytest.mark.parametrize("name", hardware_names())
def test_every_value_of_a_device_has_its_source(name: str) -> None:
    known = quantities(name)
    assert all(quantity.source and quantity.status in Status for quantity in known.values())
    device = load_hardware(name)
    assert device.bf16_flops > device.memory_bytes_per_s > device.pcie_bytes_per_s > 0
    assert device.extrapolated == (name != "h100")


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.floats(1.0, 50.0))
def test_smooth_is_between_the_larger_and_the_sum(first: float, second: float, r: float) -> None:
    value = smooth(first, second, r)
    assert max(first, second) <= value * (1 + 1e-12)
    assert value <= (first + second) * (1 + 1e-12)


def test_distinct_experts() -> None:
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(128, 8, 10_000) == pytest.approx(128)
    assert 8 < distinct_experts(128, 8, 4) < 32


def forward(name: str = "Qwen3-32B", tp: int = 4, device: str = "h100") -> Forward:
    return Forward(architecture(name), kernels_of(load_hardware(device)), engines()["vllm"], tp)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3.5-122B-A10B"])
def test_tables_are_the_forward_pass(name: str) -> None:
    model = forward(name)
    tables = StepTables(model, 64, 512)
    for n, kv in ((1, 100.0), (17, 50_000.0), (64, 1e6)):
        assert tables.alpha[n] + tables.beta[n] * kv == pytest.approx(float(model.decode_s(n, kv)), rel=1e-9)
    for step in (
        (0, 0.0, 300, 45_150.0, 300.0, 1),
        (32, 9e4, 512, 1e6, 3000.0, 0),
        (64, 1e5, 1, 2e3, 2e3, 1),
    ):
        assert tables.mixed_s(*step) == pytest.approx(model.mixed_s(*step), rel=1e-9)


@pytest.mark.parametrize("name", KNOWN)
def test_more_work_takes_longer(name: str) -> None:
    model = forward(name, tp=2)
    alpha, beta = model.tables(128)
    assert (np.diff(alpha[1:]) > 0).all()
    assert (beta[1:] > 0).all()
    reading = [model.mixed_s(8, 1e4, queries, queries**2 / 2, queries, 1) for queries in (1, 64, 512, 4096)]
    assert reading == sorted(reading)
    alone = float(model.decode_s(8, 1e4))
    assert alone < reading[0]
    separate = alone + model.mixed_s(0, 0.0, 512, 512**2 / 2, 512, 1)
    assert reading[2] < separate, "a mixed step is never the sum of two"


def test_a_device_with_little_arithmetic_attends_slower_than_it_reads() -> None:
    """The H20 reads faster than an H100, but decode attention on it is bound by padded queries."""
    slow, fast = (forward(device=device).tables(64)[1][64] for device in ("h20", "h100"))
    assert slow > fast
    read = architecture("Qwen3-32B").kv_bytes_per_token / 4 / load_hardware("h20").memory_bytes_per_s
    assert slow > 1.5 * read


def test_experts_that_are_shared_out_read_less_and_talk_more() -> None:
    model = forward("Qwen3-30B-A3B", tp=1)
    shared = replace(model, expert_ranks=2)
    assert float(shared.decode_s(64, 0.0)) < float(model.decode_s(64, 0.0))
    no_link = replace(model.kernels, hardware=load_hardware("rtxpro6000"))
    slow, fast = (replace(shared, kernels=k).body_s(4096) for k in (no_link, model.kernels))
    assert slow > fast


def test_memory() -> None:
    h20, big = load_hardware("h20"), architecture("Qwen2.5-72B")
    assert train_devices(big, h20) == 14
    assert kv_blocks(big, h20, 1) < 0, "144 GB of weights are not on one device"
    assert kv_blocks(big, h20, 8) > 2 * kv_blocks(big, h20, 4) > 0
    hybrid = architecture("Qwen3.5-122B-A10B")
    assert kv_blocks(hybrid, h20, 8, max_running=256) < kv_blocks(hybrid, h20, 8)


def test_coefficients_say_how_far_off_they_are() -> None:
    import tomllib

    from systems.costs import kernels

    raw = tomllib.loads((kernels.HERE / "kernels.toml").read_text())
    assert set(raw) == set(coefficients())
    for table in raw.values():
        assert 0 < table["held_out_error"] < 0.15
        assert table["rows"] > 0


def test_architecture_names_are_models() -> None:
    assert isinstance(architecture("Qwen3-8B"), Architecture)

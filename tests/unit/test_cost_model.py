"""Architectures, devices and forward passes: facts that must hold whatever the coefficients are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.costs.architecture import Architecture, distinct_experts
from systems.costs.forward import Forward, StepTables, engines
from systems.costs.hardware import Status, hardware_names, load_hardware, quantities
from systems.costs.kernels import FORMS, fitted, kernels_of, measured_on, smooth
from systems.costs.machines import bands, machine
from systems.costs.memory import EngineMemory, kv_blocks, state_blocks, train_devices
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


@pytest.mark.parametrize("name", hardware_names())
def test_every_value_of_a_device_has_its_source(name: str) -> None:
    known = quantities(name)
    assert all(quantity.source and quantity.status in Status for quantity in known.values())
    device = load_hardware(name)
    assert device.bf16_flops > device.memory_bytes_per_s > device.pcie_bytes_per_s > 0
    assert 0 < device.multiprocessors < 256
    for kernel in FORMS:
        assert measured_on(kernel, name) in (name, "h100")


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.floats(1.0, 50.0))
def test_smooth_is_between_the_larger_and_the_sum(first: float, second: float, r: float) -> None:
    value = smooth(first, second, r)
    assert max(first, second) <= value * (1 + 1e-12)
    assert value <= (first + second) * (1 + 1e-12)


def test_distinct_experts() -> None:
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(128, 8, 10_000) == pytest.approx(128)
    assert 8 < distinct_experts(128, 8, 4) < 32
    tokens = np.array([1, 4, 64, 10_000])
    even, skewed = distinct_experts(128, 8, tokens), distinct_experts(128, 8, tokens, 1.0)
    assert float(skewed[0]) == pytest.approx(8, rel=1e-6)
    assert (skewed[1:] < even[1:] + 1e-9).all(), "the popular ones are hit again and again"
    assert (np.diff(skewed) > 0).all()


def forward(name: str = "Qwen3-32B", tp: int = 4, device: str = "h100") -> Forward:
    return Forward(architecture(name), kernels_of(load_hardware(device)), engines()["vllm-0.12"].host, tp)


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
    assert train_devices(big, h20) == 13
    engine = EngineMemory()
    assert kv_blocks(big, h20, 1, engine) < 0, "144 GB of weights are not on one device"
    assert kv_blocks(big, h20, 8, engine) > 2 * kv_blocks(big, h20, 4, engine) > 0
    assert kv_blocks(big, h20, 8, replace(engine, share=0.95)) > kv_blocks(big, h20, 8, engine)
    assert kv_blocks(big, h20, 8, replace(engine, max_running=1024)) < kv_blocks(big, h20, 8, engine)
    assert state_blocks(big, 8) == 0
    hybrid = architecture("Qwen3.5-122B-A10B")
    assert state_blocks(hybrid, 8) * 16 * 24_576 / 2 >= hybrid.state_bytes_per_sequence / 8


def test_coefficients_say_how_far_off_they_are() -> None:
    import tomllib

    from systems.costs import kernels

    raw = tomllib.loads((kernels.HERE / "kernels.toml").read_text())
    assert set(raw) == set(fitted()) == {"h100", "a100", "h200"}
    assert set(raw["h100"]) == set(FORMS)
    for device, tables in raw.items():
        for name, table in tables.items():
            error = table["context_held_out_error" if name == "linear_attention" else "held_out_error"]
            limit = 0.22 if (device, name) == ("a100", "experts") else 0.15  # see docs/limits.md
            assert 0 < error < limit


def test_every_axis_has_a_band_on_every_device() -> None:
    for device in hardware_names():
        known = bands(device)
        assert set(FORMS) <= set(known)
        for band in known.values():
            assert 0 < band.low < band.high
            assert band.source


def test_machines_cover_the_bands() -> None:
    """A Latin hypercube has one machine in each of N parts of equal probability, on every axis."""
    machines = [machine("h20", number, 10) for number in range(1, 11)]
    for axis, band in bands("h20").items():
        drawn = sorted(one[axis] for one in machines)
        assert sum(band.low <= factor <= band.high for factor in drawn) == 8
    assert machine("h20", 0, 0) == {}
    assert machine("h20", 3, 10) == machines[2]
    with pytest.raises(ValueError, match="machine 11 of 10"):
        machine("h20", 11, 10)


def test_a_slower_kernel_is_as_much_slower() -> None:
    kernels = kernels_of(load_hardware("h20"))
    for name, seconds in {
        "gemm": lambda k: k.gemm_s(64, 4096, 4096),
        "prefill_attention": lambda k: k.prefill_attention_s(5e5, 1000, 1000, 32, 8, 128),
        "decode_attention": lambda k: k.decode_attention_s(64, 1e5, 32, 8, 128),
        "experts": lambda k: k.experts_s(64, 60, 8, 2048, 768),
        "all_reduce": lambda k: k.all_reduce_s(1e6, 4),
        "linear_attention": lambda k: k.linear_prefill_s(32, 1000, 1, 1000),
    }.items():
        slower = kernels.scaled({name: 1.5})
        assert float(seconds(slower)) == pytest.approx(1.5 * float(seconds(kernels)), rel=1e-6)
        assert float(seconds(kernels.scaled({"host": 2.0}))) == float(seconds(kernels))


def test_architecture_names_are_models() -> None:
    assert isinstance(architecture("Qwen3-8B"), Architecture)

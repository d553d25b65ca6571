"""What training and shifts cost: arithmetic by hand, contention in a node, and shipped values."""

from __future__ import annotations

import asyncio
import tomllib
from dataclasses import replace

import pytest

from harness.fit.shifts import PHASES, fit_shifts, held_out_shifts, quoted
from harness.runs.assemble import assemble
from harness.runs.costs import modelled
from systems.costs import cost as shipped
from systems.costs.cost import ClusterCost
from systems.costs.hardware import load_hardware
from systems.costs.kernels import fitted
from systems.costs.training import TrainingCost, forward_flops, seconds_a_flop
from systems.loop.clock import now_ns, run_virtual
from systems.types import NS_PER_S, How, Placement, Role, Shift
from tests.conftest import small_spec
from workloads.groups import architecture, load_group

H20 = load_hardware("h20")


def test_a_forward_pass_by_hand() -> None:
    """Qwen2.5-7B has 28 layers of 28 heads of 128."""
    model = architecture("Qwen2.5-7B")
    linear = 2 * model.params_active * 1000
    attention = 4 * 28 * 28 * 128 * 1000 * 1001 / 2
    assert forward_flops(model, 1000, 1000 * 1001 / 2) == pytest.approx(linear + attention)


def test_only_full_attention_costs_pairs() -> None:
    hybrid = architecture("Qwen3.5-122B-A10B")
    whole = replace(hybrid, linear_layers=0)
    pairs = [forward_flops(model, 0, 1e6) for model in (hybrid, whole)]
    assert pairs[0] / pairs[1] == pytest.approx(12 / 48)


def test_long_responses_cost_more_than_their_tokens() -> None:
    training = TrainingCost(architecture("Qwen2.5-7B"), H20, 0.2, 1e-14)
    long, short = training.device_s(16_000, 16_000**2 / 2), 16 * training.device_s(1000, 1000**2 / 2)
    assert 1.1 < long / short < 1.6


def test_a_pipeline_idles_while_it_fills() -> None:
    """Four stages of eight devices, 512 sequences: one pipeline on 32 devices, two on 64."""
    training = TrainingCost(architecture("Qwen2.5-72B"), H20, 0.2, 1e-14, 0.0, 4, 8, 512)
    assert training.bubble(32) == pytest.approx(3 / 512)
    assert training.bubble(64) == pytest.approx(3 / 256)
    assert replace(training, stages=1).bubble(64) == 0
    ratio = training.micro_s(1000, 5e5, 64) / training.micro_s(1000, 5e5, 32)
    assert ratio == pytest.approx((1 + 3 / 256) / (1 + 3 / 512) / 2)


def test_a_token_that_stands_for_many_attends_to_many() -> None:
    one = TrainingCost(architecture("Qwen2.5-1.5B"), H20, 0.2, 1e-14)
    many = replace(one, token_scale=128)
    assert many.device_s(10, 55.0) == pytest.approx(one.device_s(1280, 55.0 * 128**2))


def test_a_device_with_a_smaller_peak_loses_less_to_the_rest() -> None:
    h100, gemm = load_hardware("h100"), fitted()["h100"]["gemm"].compute
    assert 1 / (h100.bf16_flops * seconds_a_flop(h100, 0.25)) == pytest.approx(0.25)
    reached = 1 / (H20.bf16_flops * seconds_a_flop(H20, 0.25))
    assert 0.25 < reached < gemm
    assert seconds_a_flop(H20, 0.25) > seconds_a_flop(h100, 0.25)


def test_what_is_communicated_does_not_shrink_with_devices() -> None:
    """So twice the devices are never twice as fast, and experts are not gathered."""
    training = TrainingCost(architecture("Qwen2.5-7B"), H20, 0.2, 1e-14, 4e-10)
    alone = training.step_s(1)
    assert alone == pytest.approx(replace(training, byte_s=0.0).step_s(1))
    sent = 2 * architecture("Qwen2.5-7B").params_total * 4e-10
    assert training.step_s(64) - replace(training, byte_s=0.0).step_s(64) == pytest.approx(sent * 63 / 64)
    experts = architecture("Qwen3-30B-A3B")
    assert experts.gathered_params < 0.1 * experts.params_total


def cluster() -> ClusterCost:
    return modelled(load_group("dense-9b"), real=False)


def test_devices_of_a_node_share_its_host_memory() -> None:
    cost = cluster()
    alone, together = (cost.copy_s(10e9, sharing) for sharing in (1, 8))
    assert together == pytest.approx(8 * 10e9 / H20.node_host_bytes_per_s)
    assert alone == pytest.approx(10e9 / min(H20.pcie_bytes_per_s, H20.node_host_bytes_per_s))
    assert alone < together


def shifts_at_once(devices: list[int]) -> list[float]:
    """When each of several rollout replicas is there that are loaded at the same moment."""
    backend = assemble(small_spec(model="dense-9b", steps=1, gpus=16)).backend

    async def one(device: int) -> float:
        target = Placement(Role.ROLLOUT, (device,))
        async for _ in backend.shift(Shift(device, (), (target,), How.MIGRATE), 0):
            pass
        return now_ns() / NS_PER_S

    async def run() -> list[float]:
        backend.start()
        return list(await asyncio.gather(*(one(device) for device in devices)))

    return run_virtual(run())


def test_shifts_in_one_node_wait_for_each_other_and_those_in_two_do_not() -> None:
    (alone,) = shifts_at_once([0])
    same, other = shifts_at_once([0, 1, 2, 3]), shifts_at_once([0, 8])
    assert other == [alone, alone]
    assert len(set(same)) == 1
    cost, moved = cluster(), 2 * architecture("Qwen2.5-1.5B").params_total
    assert same[0] - alone == pytest.approx(cost.copy_s(moved, 4) - cost.copy_s(moved, 1), abs=1e-6)


def test_shipped_costs_are_those_that_the_quoted_seconds_give() -> None:
    fit = fit_shifts(*quoted())
    raw = tomllib.loads((shipped.HERE / "shift.toml").read_text())
    assert sum(raw["phase_s"].values()) == pytest.approx(fit.shift_s, rel=0.01)
    for phase, share in PHASES.items():
        assert raw["phase_s"][phase] == pytest.approx(share * fit.shift_s, rel=0.02)
    assert raw["control_s"]["publish"] + raw["control_s"]["update"] == pytest.approx(fit.update_s, rel=0.01)
    for name, rate in fit.node_bytes_per_s.items():
        assert load_hardware(name).node_host_bytes_per_s == pytest.approx(rate, rel=0.01)


def test_a_system_is_predicted_without_its_own_shifts() -> None:
    updates, shifts = quoted()
    slow = [replace(row, seconds=100.0) if row.system == "Libra" else row for row in shifts]
    before, after = (
        {row.what: found for row, found in held_out_shifts(updates, rows) if row.system == "Libra"}
        for rows in (shifts, slow)
    )
    assert before == after
    assert fit_shifts(updates, [row for row in slow if row.system == "Libra"]).shift_s == 100.0


def test_shipped_shares_say_how_far_off_they_are() -> None:
    raw = tomllib.loads((shipped.HERE / "training.toml").read_text())
    assert 0 < raw["utilisation"]["experts"] < raw["utilisation"]["dense"] < 0.6
    assert 0 < raw["communication"]["byte_s"] < 1e-8
    assert 0 < raw["fit"]["held_out_error_dense"] < 0.2
    assert raw["fit"]["rows"] == 11

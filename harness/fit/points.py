"""What the simulator says of one measurement: a row with a `kind`, and what it was of.

| kind        | columns (those in brackets may be left out)                                 | predicts
|
|-------------|-----------------------------------------------------------------------------|-------------------------|
| serving     | concurrency, input_tokens, output_tokens [requests, tp, max_running, share] | tpot_ms,
output_tok_s   |
| static      | batch, context [tp]                                                         | step_ms
|
| kv_capacity | [tp, share, max_running, token_budget]                                      | kv_tokens
|
| rl_step     | gpus, responses, mean_tokens, max_tokens [tp, train_samples, steps_off]     | step_s
|
| kernel      | kernel, and its own columns                                                 | latency_us
|
| sync        | gpus [way: store or gather]                                                 | seconds
|
| shift       | role [tp]                                                                   | seconds
|

All have `model` (a known one, or a `config.json`) but `kernel`, and `device` and `engine` where they matter.
Every prediction has a band: what 80 % of the plausible machines say (`systems/costs/machines.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UsageError, unknown
from harness.fit.closed_loop import Point, throughput
from harness.fit.kernels import COLUMNS, Served, tpot_s
from harness.fit.rl_steps import Published, parts_of
from harness.fit.routing import hit_and_routed
from systems.costs.architecture import Architecture
from systems.costs.cost import ENGINE, ServingCost, Sync, cluster_cost
from systems.costs.durations import Bounds
from systems.costs.families import ArchitectureError, read_config
from systems.costs.forward import engines
from systems.costs.hardware import MEASURED_ON, hardware_names, load_hardware
from systems.costs.kernels import BYTES, FORMS, kernels_of
from systems.costs.machines import machine
from systems.costs.memory import SHARE, EngineMemory, kv_blocks
from systems.costs.training import trained
from systems.types import Role
from workloads.groups import architecture, architecture_names

MACHINES = 24  # that a band is made of
REQUESTS = 4  # so many times the concurrency, where a row does not say
Row = Mapping[str, str]
Slower = Mapping[str, float]


@dataclass(frozen=True)
class Predicted:
    """What the nominal machine says, and between which values 80 % of the plausible ones are."""

    metric: str
    value: float
    low: float
    high: float


class Reader:
    """A row's fields, with one-line refusals that name row and column."""

    def __init__(self, row: Row, where: str) -> None:
        self._row = {key.strip().lower(): (value or "").strip() for key, value in row.items() if key}
        self.where = where

    def text(self, column: str, default: str | None = None) -> str:
        value = self._row.get(column, "")
        if value:
            return value
        if default is None:
            raise UsageError(f"{self.where}: no '{column}', which a row of kind '{self.kind}' needs")
        return default

    def number(self, column: str, default: float | None = None) -> float:
        value = self.text(column, None if default is None else str(default))
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"{self.where}: {column} is '{value}', not a number") from None
        if not 0 < number < 1e12:
            raise UsageError(f"{self.where}: {column} is {value}; a number above 0 is needed")
        return number

    def count(self, column: str, default: int | None = None) -> int:
        return round(self.number(column, default))

    def has(self, column: str) -> bool:
        return bool(self._row.get(column))

    @property
    def kind(self) -> str:
        kind = self._row.get("kind", "")
        if kind not in KINDS:
            raise UsageError(f"{self.where}: {unknown('kind', kind, KINDS)}")
        return kind

    @property
    def device(self) -> str:
        device = self.text("device", MEASURED_ON).lower()
        if device not in hardware_names():
            raise UsageError(f"{self.where}: {unknown('device', device, hardware_names())}")
        return device

    @property
    def engine(self) -> str:
        engine = self.text("engine", ENGINE)
        if engine not in engines():
            raise UsageError(f"{self.where}: {unknown('engine', engine, engines())}")
        return engine

    @property
    def model(self) -> Architecture:
        name = self.text("model")
        if name.endswith(".json") or Path(name).is_dir():
            path = Path(name)
            try:
                return read_config(path / "config.json" if path.is_dir() else path)
            except ArchitectureError as error:
                raise UsageError(f"{self.where}: {error}") from None
        if name not in architecture_names():
            raise UsageError(f"{self.where}: {unknown('model', name, architecture_names())}")
        return architecture(name)


def predict(row: Row, where: str = "the row", machines: int = MACHINES) -> list[Predicted]:
    """Everything that is predicted of a row. Raises `UsageError` naming row and column."""
    reader = Reader(row, where)
    ask = KINDS[reader.kind]
    nominal = ask(reader, {})
    drawn = [ask(reader, machine(reader.device, number, machines)) for number in range(1, machines + 1)]
    found = []
    for metric, value in nominal.items():
        low, high = (
            np.quantile([one[metric] for one in drawn], (0.1, 0.9)).tolist() if drawn else (value,) * 2
        )
        found.append(Predicted(metric, value, low, high))
    return found


# ------------------------------------------------------------------------------- by kind


def _replica(row: Reader, slower: Slower, most: int) -> ServingCost:
    cost = ServingCost(
        row.model, load_hardware(row.device), row.count("tp", 1), max(most, row.count("max_running", 256)),
        engine=row.engine, memory_share=row.number("share", SHARE), slower=slower,
    )  # fmt: skip
    if cost.kv_capacity_tokens <= 0:
        raise UsageError(f"{row.where}: the weights of {cost.label} leave no memory for a KV cache")
    return cost


def _serving(row: Reader, slower: Slower) -> dict[str, float]:
    concurrency, prompt, output = (row.count(key) for key in ("concurrency", "input_tokens", "output_tokens"))
    cost = _replica(row, slower, concurrency)
    requests = row.count("requests", REQUESTS * concurrency)
    blocks = row.count("kv_tokens", cost.kv_capacity_tokens) // 16
    bounds = Bounds(cost.max_running, cost.bounds().token_budget, blocks, cost.bounds().state_blocks)
    reached = throughput(cost.tables, bounds, Point("", prompt, output, concurrency, requests, 0.0))
    one = tpot_s(cost.forward, Served(concurrency, prompt, output, cost.tp, 0.0))
    return {"tpot_ms": one * 1e3, "output_tok_s": reached}


def _static(row: Reader, slower: Slower) -> dict[str, float]:
    batch, context = row.count("batch"), row.number("context")
    forward = _replica(row, slower, batch).forward
    return {"step_ms": float(forward.decode_s(float(batch), batch * context)) * 1e3}


def _capacity(row: Reader, slower: Slower) -> dict[str, float]:
    hardware, engine = load_hardware(row.device), engines()[row.engine]
    memory = EngineMemory(
        row.number("share", SHARE), row.count("max_running", 256), row.count("token_budget", 8192),
        row.number("sampler", engine.sampler), engine.graphs_bytes, slower.get("memory", 1.0),
    )  # fmt: skip
    return {"kv_tokens": float(kv_blocks(row.model, hardware, row.count("tp", 1), memory) * 16)}


def _rl_step(row: Reader, slower: Slower) -> dict[str, float]:
    model = row.model
    asked = Published(
        row.where, model.name, 0 if not row.has("steps_off") else row.count("steps_off"), row.count("gpus"),
        row.count("responses"), row.number("mean_tokens"), row.count("max_tokens"), row.count("tp", 1),
        row.count("train_samples", row.count("responses")), row.count("train_width", 1),
        row.count("train_stages", 1), 0.0,
    )  # fmt: skip
    kernels = kernels_of(load_hardware(row.device)).scaled(slower)
    host = engines()[row.engine].host.scaled(slower.get("host", 1.0))
    byte_s = trained()["communication"]["byte_s"] * slower.get("communication", 1.0)
    parts = parts_of(asked, kernels, host, byte_s, model)
    shares = [trained()["utilisation"][kind] / slower.get("training", 1.0) for kind in ("dense", "experts")]
    return {"step_s": parts.step_s(np.array([*shares, 1.0]))}


def _kernel(row: Reader, slower: Slower) -> dict[str, float]:
    name = row.text("kernel")
    if name not in FORMS:
        raise UsageError(f"{row.where}: {unknown('kernel', name, FORMS)}")
    kernels = kernels_of(load_hardware(row.device)).scaled(slower)
    if name == "linear_attention":
        tokens, sequences = row.number("tokens"), row.number("sequences", 1)
        seconds = kernels.linear_prefill_s(row.number("heads"), tokens, sequences, tokens / sequences)
        return {"latency_us": float(seconds) * 1e6}
    given = [row.number(column) for column in COLUMNS[name]]
    match name:
        case "gemm":
            seconds = kernels.gemm_s(*given)
        case "prefill_attention":
            batch, length, heads, kv_heads = given
            pairs, tokens = batch * length * (length + 1) / 2, batch * length
            seconds = kernels.prefill_attention_s(pairs, tokens, tokens, heads, kv_heads, 128, batch)
        case "decode_attention":
            batch, context, heads, kv_heads = given
            seconds = kernels.decode_attention_s(batch, batch * context, heads, kv_heads, 128)
        case "all_reduce":
            devices, size = given
            seconds = kernels.all_reduce_s(2 * size, devices)
        case _:
            tokens, hidden, inter, per_token, experts, tp, ranks = given
            routing = row.text("distribution", "balanced")
            hit, routed = hit_and_routed(int(experts), int(per_token), int(tokens), int(ranks), routing)
            width = inter / tp
            seconds = kernels.experts.seconds(
                6.0 * routed * hidden * width, BYTES * 3.0 * hit * hidden * width,
                BYTES * tokens * per_token * hidden, kernels.hardware,
            ) * kernels.factor("experts")  # fmt: skip
    return {"latency_us": float(seconds) * 1e6}


def _cluster(row: Reader, slower: Slower, sync: Sync = Sync.STORE) -> Any:
    model, tp = row.model, row.count("tp", 1)
    return cluster_cost(
        model, model, load_hardware(row.device), policy_tp=tp, judge_tp=tp, max_running=256, sync=sync,
        engine=row.engine, slower=slower,
    )  # fmt: skip


def _sync(row: Reader, slower: Slower) -> dict[str, float]:
    way = row.text("way", Sync.STORE)
    if way not in [one.value for one in Sync]:
        raise UsageError(f"{row.where}: {unknown('way', way, [one.value for one in Sync])}")
    cost = _cluster(row, slower, Sync(way))
    return {"seconds": cost.publish_s(row.count("gpus")) + cost.update_s()}


def _shift(row: Reader, slower: Slower) -> dict[str, float]:
    role = row.text("role")
    if role not in (Role.ROLLOUT, Role.REWARD):
        raise UsageError(f"{row.where}: {unknown('role', role, (Role.ROLLOUT, Role.REWARD))}")
    return {"seconds": _cluster(row, slower).warm_shift_s()}


KINDS: dict[str, Callable[[Reader, Slower], dict[str, float]]] = {
    "serving": _serving, "static": _static, "kv_capacity": _capacity, "rl_step": _rl_step, "kernel": _kernel,
    "sync": _sync, "shift": _shift,
}  # fmt: skip


@cache
def metrics() -> Sequence[str]:
    """Columns in which a file of measurements may say what came out."""
    return ("tpot_ms", "output_tok_s", "step_ms", "kv_tokens", "step_s", "latency_us", "seconds")

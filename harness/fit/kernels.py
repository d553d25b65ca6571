"""Fits the kernels' and the engines' coefficients to public measurements, and says how far off they are.

Errors are held out by shape group: whole shapes (a weight matrix, a head layout, an expert size, a number of
devices) are left out, fitted without, and predicted. Random rows would sit between their neighbours.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness.errors import UsageError
from systems.costs.architecture import Architecture
from systems.costs.forward import Forward, Host
from systems.costs.hardware import MEASURED_ON, load_hardware
from systems.costs.kernels import AllReduce, DecodeAttention, Experts, Kernels, Roofline

FOLDS = 5
HEAD_DIM = 128  # of all attention rows; the tables do not state it
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Measured seconds of one kernel: columns by name, and the shape group of each row."""

    name: str
    columns: Mapping[str, Floats]
    seconds: Floats
    groups: NDArray[np.int64]

    def rows(self, chosen: NDArray[np.bool_]) -> Table:
        return Table(
            self.name,
            {key: values[chosen] for key, values in self.columns.items()},
            self.seconds[chosen],
            self.groups[chosen],
        )


@dataclass(frozen=True)
class Fit:
    """Coefficients and their mean absolute percentage errors."""

    name: str
    value: Any  # a Roofline, DecodeAttention or AllReduce
    error: float  # held out
    rows: int
    groups: int


def read_rows(data: Path, name: str, needed: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file in the data folder. Raises `UsageError` for a missing file or column."""
    path = data / name
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"--data {data}: {name}: {error.strerror}") from None
    missing = [column for column in needed if rows and column not in rows[0]]
    if missing or not rows:
        raise UsageError(f"--data {data}: {name}: {f'no column {missing[0]}' if missing else 'is empty'}")
    return rows


def table(
    data: Path, name: str, file: str, columns: Sequence[str], group: Callable[[Mapping[str, str]], Hashable],
    keep: Callable[[Mapping[str, str]], bool] = lambda row: True,
) -> Table:  # fmt: skip
    rows = [row for row in read_rows(data, file, [*columns, "latency_ms"]) if keep(row)]
    keys = [group(row) for row in rows]
    numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return Table(
        name,
        {column: np.array([float(row[column]) for row in rows]) for column in columns},
        np.array([float(row["latency_ms"]) * 1e-3 for row in rows]),
        np.array([numbers[key] for key in keys]),
    )


def kernel_tables(data: Path) -> list[Table]:
    """All measured kernels, on an H100 with vLLM 0.19, bf16."""
    prefix = "ops_h100_sxm_vllm0.19.0_"
    return [
        table(data, "gemm", prefix + "gemm_bf16.csv", ("m", "n", "k"), lambda r: (r["n"], r["k"])),
        table(
            data, "prefill_attention", prefix + "prefill_attn_bf16.csv",
            ("batch_size", "isl", "num_heads", "num_key_value_heads"),
            lambda r: (r["num_heads"], r["num_key_value_heads"]),
        ),
        table(
            data, "decode_attention", prefix + "decode_attn_bf16.csv",
            ("batch_size", "context", "num_heads", "num_key_value_heads"),
            lambda r: (r["num_heads"], r["num_key_value_heads"]),
        ),
        table(
            data, "experts", prefix + "moe_bf16.csv",
            ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
            lambda r: (r["hidden_size"], r["moe_tp_size"], r["moe_ep_size"]),
            keep=lambda r: r["distribution"] == "balanced",
        ),
        table(
            data, "all_reduce", prefix + "allreduce.csv", ("num_gpus", "message_size"),
            lambda r: r["num_gpus"], keep=lambda r: r["backend"] == "vllm_graph",
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------------------- predicting

START: dict[str, Any] = {
    "gemm": Roofline(4e-6, 0.8, 0.85, 3.0),
    "prefill_attention": Roofline(1.2e-5, 0.75, 0.8, 1.0),
    "decode_attention": DecodeAttention(1e-5, 3e-10, 2e-8, 0.9, 0.6),
    "experts": Experts(3e-5, 0.5, 0.9, 1.5, 3.0),
    "all_reduce": AllReduce(4e-6, 3e-7, 0.5, 0.7, 2e-6, 1e-5, 4e-6, 0.7, 2e-5, 0.5),
}


def predict(kernels: Kernels, rows: Table) -> Floats:
    """Seconds of every row of `rows`."""
    c = rows.columns
    if rows.name == "gemm":
        return np.asarray(kernels.gemm_s(c["m"], c["n"], c["k"]))
    if rows.name == "prefill_attention":
        length, batch = c["isl"], c["batch_size"]
        return np.asarray(
            kernels.prefill_attention_s(
                batch * length * (length + 1) / 2, batch * length, batch * length,
                c["num_heads"], c["num_key_value_heads"], HEAD_DIM,
            )
        )  # fmt: skip
    if rows.name == "decode_attention":
        return np.asarray(
            kernels.decode_attention_s(
                c["batch_size"], c["batch_size"] * c["context"], c["num_heads"],
                c["num_key_value_heads"], HEAD_DIM,
            )
        )  # fmt: skip
    if rows.name == "experts":
        return _experts(kernels, c)
    return np.asarray(kernels.all_reduce_s(2 * c["message_size"], c["num_gpus"]))


def _experts(kernels: Kernels, c: Mapping[str, Floats]) -> Floats:
    """Balanced routing spreads tokens without collisions, so min(E, k*T) experts are hit."""
    devices = c["moe_ep_size"]
    pairs = c["num_tokens"] * c["topk"] / devices  # of a device
    distinct = np.minimum(c["num_experts"] / devices, np.maximum(1.0, pairs))
    width = c["inter_size"] / c["moe_tp_size"]
    return np.asarray(
        kernels.experts_s(c["num_tokens"], distinct, c["topk"], c["hidden_size"], width, devices)
    )


# ------------------------------------------------------------------------------- fitting


def fit_kernel(rows: Table) -> Fit:
    """Fit on all rows; the error is that of rows whose shape group was held out."""
    value = _fit(rows)
    held_out = []
    folds = np.asarray([group % FOLDS for group in rows.groups])
    count = len(np.unique(rows.groups))
    parts = folds if count >= FOLDS else rows.groups  # few groups: leave one out
    for fold in np.unique(parts):
        without = _fit(rows.rows(parts != fold))
        tested = rows.rows(parts == fold)
        held_out.append(np.abs(predict(_kernels(rows.name, without), tested) / tested.seconds - 1.0))
    return Fit(rows.name, value, float(np.mean(np.concatenate(held_out))), len(rows.seconds), count)


def _kernels(name: str, value: Any) -> Kernels:
    return replace(Kernels(load_hardware(MEASURED_ON), **START), **{name: value})


def _fit(rows: Table) -> Any:
    """Least absolute log error (smoothed), over the logarithms of the coefficients."""
    start = START[rows.name]
    names = [field.name for field in fields(start)]
    first = np.log([getattr(start, name) for name in names])

    def residuals(logs: Floats) -> Floats:
        value = type(start)(**dict(zip(names, np.exp(logs), strict=True)))
        return np.log(predict(_kernels(rows.name, value), rows) / rows.seconds)

    found = least_squares(residuals, first, loss="soft_l1", f_scale=0.05, max_nfev=400)
    return type(start)(**{name: float(v) for name, v in zip(names, np.exp(found.x), strict=True)})


# ------------------------------------------------------------------------------- the host layer

TPOT_FILE = "e2e_silicon_hopper.csv"
TPOT_MODEL, TPOT_HARDWARE, TPOT_ENGINE = "Qwen/Qwen3-32B", "h100_sxm", "vllm"
SERVER_BUDGET = 8192  # tokens a step: vLLM's default on these devices
HOST_START = Host(1e-3, 1e-5, 5e-5, 1.0)


@dataclass(frozen=True)
class Served:
    """One closed-loop measurement: `concurrency` requests at any time, the time of an output token."""

    concurrency: int
    prompt: int
    output: int
    tp: int
    tpot_s: float


def served_rows(data: Path, model: str, hardware: str, engine: str, precision: str = "") -> list[Served]:
    """Rows of the end-to-end table. An empty precision is the model's default, bf16 (by inference)."""
    needed = ("model_path", "system", "backend", "precision", "isl", "osl", "batch_size", "tp_size")
    return [
        Served(
            int(float(row["batch_size"])), int(row["isl"]), int(row["osl"]), int(float(row["tp_size"])),
            float(row["silicon_tpot_ms"]) * 1e-3,
        )
        for row in read_rows(data, TPOT_FILE, (*needed, "silicon_tpot_ms"))
        if (row["model_path"], row["system"], row["backend"]) == (model, hardware, engine)
        and row["precision"] == precision and float(row["pp_size"]) == 1
    ]  # fmt: skip


def tpot_s(forward: Forward, row: Served) -> float:
    """Time of an output token in a closed loop.

    While a request writes its tokens, each of the others ends once and is replaced; reading the replacement
    in makes some steps mixed ones.
    """
    n, kv = row.concurrency, row.concurrency * (row.prompt + row.output / 2)
    decode = float(forward.decode_s(n, kv))
    longer, done = 0.0, 0
    while done < row.prompt:
        new = min(row.prompt - done, SERVER_BUDGET - n)
        pairs = new * done + new * (new + 1) / 2
        ends = int(done + new == row.prompt)
        longer += forward.mixed_s(n, kv, new, pairs, done + new, ends) - decode
        done += new
    return decode + (n - 1) / row.output * longer


def fit_host(kernels: Kernels, model: Architecture, rows: Sequence[Served]) -> Host:
    names = [field.name for field in fields(Host)]
    measured = np.array([row.tpot_s for row in rows])

    def residuals(logs: Floats) -> Floats:
        host = Host(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.asarray(np.log(tpots(kernels, model, host, rows) / measured))

    first = np.log([getattr(HOST_START, name) for name in names])
    found = least_squares(residuals, first, loss="soft_l1", f_scale=0.05)
    return Host(**dict(zip(names, np.exp(found.x).tolist(), strict=True)))


def tpots(kernels: Kernels, model: Architecture, host: Host, rows: Sequence[Served]) -> Floats:
    forwards = {tp: Forward(model, kernels, host, tp) for tp in {row.tp for row in rows}}
    return np.array([tpot_s(forwards[row.tp], row) for row in rows], dtype=np.float64)


def held_out(
    kernels: Kernels, model: Architecture, rows: Sequence[Served], by: Callable[[Served], int]
) -> dict[int, Floats]:
    """Signed relative errors of the rows with each value of `by`, fitted on all other values."""
    errors = {}
    for value in sorted({by(row) for row in rows}):
        tested = [row for row in rows if by(row) == value]
        host = fit_host(kernels, model, [row for row in rows if by(row) != value])
        measured = np.array([row.tpot_s for row in tested])
        errors[value] = tpots(kernels, model, host, tested) / measured - 1.0
    return errors

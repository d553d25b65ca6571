"""Fits the kernels' and the engines' coefficients to public measurements, and says how far off they are.

Errors are held out by shape group: whole shapes (a weight matrix, a head layout, an expert size, a number of
devices) are left out, fitted without, and predicted. Random rows would sit between their neighbours.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness.errors import UsageError
from harness.fit.routing import hit_and_routed
from systems.costs.architecture import Architecture
from systems.costs.forward import Forward, Host
from systems.costs.hardware import MEASURED_ON, load_hardware
from systems.costs.kernels import (
    BYTES,
    STATE,
    AllReduce,
    DecodeAttention,
    Experts,
    Gemm,
    Kernels,
    LinearAttention,
    PrefillAttention,
)

FOLDS = 5
QUANTILES = (0.1, 0.9)  # of a band
REACH, SHARPNESS_REACH = 9.0, 1.8  # how far from its start a coefficient may go, in natural logarithms
F_SCALE = 0.03  # log errors far above it count for their size, not for its square
HEAD_DIM = 128  # of all attention rows; the tables do not state it
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Measured seconds of one kernel on one device: columns by name, and the shape group of each row."""

    name: str
    device: str
    columns: Mapping[str, Floats]
    seconds: Floats
    groups: NDArray[np.int64]

    def rows(self, chosen: NDArray[np.bool_]) -> Table:
        return Table(
            self.name,
            self.device,
            {key: values[chosen] for key, values in self.columns.items()},
            self.seconds[chosen],
            self.groups[chosen],
        )


@dataclass(frozen=True)
class Band:
    """Where 80 % of rows lie: measured over predicted, held out. `coverage` is the share of rows inside of
    bands that were made without their fold."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Fit:
    """Coefficients and their mean absolute percentage errors."""

    name: str
    device: str
    value: Any  # one of `FORMS`
    error: float  # held out
    rows: int
    groups: int
    band: Band


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


Row = Mapping[str, str]
COLUMNS: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "prefill_attention": ("batch_size", "isl", "num_heads", "num_key_value_heads"),
    "decode_attention": ("batch_size", "context", "num_heads", "num_key_value_heads"),
    "experts": (
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    ),
    "all_reduce": ("num_gpus", "message_size"),
}  # fmt: skip
SHAPE: dict[str, tuple[str, ...]] = {  # rows that differ in nothing of it are left out together
    "gemm": ("n", "k"),
    "prefill_attention": ("num_heads", "num_key_value_heads"),
    "decode_attention": ("num_heads", "num_key_value_heads"),
    "experts": ("hidden_size", "moe_tp_size", "moe_ep_size"),
    "all_reduce": ("num_gpus",),
}
H100_FILES = {
    "gemm": "gemm_bf16", "prefill_attention": "prefill_attn_bf16", "decode_attention": "decode_attn_bf16",
    "experts": "moe_bf16", "all_reduce": "allreduce",
}  # fmt: skip
OTHERS_FILE, OTHERS = "ops_a100_h200_vllm.csv", ("a100", "h200")
LINEAR_FILE = "ops_h100_linear_attention_vllm0.24.0.csv"


def table(name: str, device: str, rows: Sequence[Row]) -> Table:
    """One kernel's rows of a file, with the experts that they hit."""
    keys = [tuple(row[column] for column in SHAPE[name]) for row in rows]
    numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    columns = {column: np.array([float(row[column]) for row in rows]) for column in COLUMNS[name]}
    if name == "experts":
        counts = ("num_experts", "topk", "num_tokens", "moe_ep_size")
        found = [
            hit_and_routed(*(int(float(row[count])) for count in counts), row["distribution"]) for row in rows
        ]
        columns["hit"], columns["routed"] = (np.array(values) for values in zip(*found, strict=True))
    seconds = np.array([float(row["latency_ms"]) * 1e-3 for row in rows])
    return Table(name, device, columns, seconds, np.array([numbers[key] for key in keys]))


def kernel_tables(data: Path) -> list[Table]:
    """All measured kernels, bf16, vLLM's: the H100's first."""
    found = []
    for name, file in H100_FILES.items():
        path = f"ops_h100_sxm_vllm0.19.0_{file}.csv"
        rows = [
            row
            for row in read_rows(data, path, [*COLUMNS[name], "latency_ms"])
            if name != "all_reduce" or row["backend"] == "vllm_graph"
        ]
        found.append(table(name, MEASURED_ON, rows))
    found.append(linear_table(data, "context"))
    everything = read_rows(data, OTHERS_FILE, ["gpu", "kernel", "latency_ms"])
    for device in OTHERS:
        for name in COLUMNS:
            rows = [row for row in everything if (row["gpu"], row["kernel"]) == (device, name)]
            if rows:
                found.append(table(name, device, rows))
    return found


def linear_table(data: Path, phase: str) -> Table:
    """Linear attention: the gated delta rule and its convolution together; shape groups are lengths in
    prefill and batch sizes in decode, because one model's heads are all there is."""
    shape = ("batch_size", "seq_len", "num_v_heads", "head_k_dim", "head_v_dim")
    together: dict[tuple[float, ...], float] = {}
    for row in read_rows(data, LINEAR_FILE, [*shape, "phase", "latency_ms"]):
        if row["phase"] == phase:
            key = tuple(float(row[column]) for column in shape)
            together[key] = together.get(key, 0.0) + float(row["latency_ms"]) * 1e-3
    batch, length, heads, key_dim, value_dim = np.array(list(together)).T
    grouped = length if phase == "context" else batch
    return Table(
        f"linear_{phase}",
        MEASURED_ON,
        {"sequences": batch, "length": length, "heads": heads * key_dim * value_dim / STATE},
        np.array(list(together.values())),
        np.unique(grouped, return_inverse=True)[1],
    )


# ------------------------------------------------------------------------------- predicting

START: dict[str, Any] = {
    "gemm": Gemm(4e-6, 4e-10, 0.8, 0.85, 3.0, 70.0, 0.3, 1.0),
    "prefill_attention": PrefillAttention(1e-5, 0.75, 0.6, 1.0, 2e-9),
    "decode_attention": DecodeAttention(1e-5, 3e-10, 2e-8, 0.9, 0.6),
    "experts": Experts(3e-5, 0.5, 0.9, 1.5, 3.0),
    "all_reduce": AllReduce(4e-6, 3e-7, 0.5, 0.7, 2e-6, 1e-5, 4e-6, 0.7, 2e-5, 0.5),
    "linear_attention": LinearAttention(1e-5, 8e-10, 7e-8, 5e-8, 2.0, 4.5e-8, 6.5e-6, 2.0),
}
PARTS = {  # fields that one of the two linear tables decides
    "linear_context": ("t0_s", "token_s", "sequence_s", "walk_s", "sharpness"),
    "linear_generation": ("decode_s", "decode_least_s", "decode_sharpness"),
}


def predict(kernels: Kernels, rows: Table) -> Floats:
    """Seconds of every row of `rows`."""
    c = rows.columns
    match rows.name:
        case "gemm":
            found = kernels.gemm_s(c["m"], c["n"], c["k"])
        case "prefill_attention":
            length, batch = c["isl"], c["batch_size"]
            found = kernels.prefill_attention_s(
                batch * length * (length + 1) / 2, batch * length, batch * length,
                c["num_heads"], c["num_key_value_heads"], HEAD_DIM, batch,
            )  # fmt: skip
        case "decode_attention":
            found = kernels.decode_attention_s(
                c["batch_size"], c["batch_size"] * c["context"], c["num_heads"],
                c["num_key_value_heads"], HEAD_DIM,
            )  # fmt: skip
        case "experts":
            hidden, width = c["hidden_size"], c["inter_size"] / c["moe_tp_size"]
            found = kernels.experts.seconds(
                6.0 * c["routed"] * hidden * width, BYTES * 3.0 * c["hit"] * hidden * width,
                BYTES * c["num_tokens"] * c["topk"] * hidden, kernels.hardware,
            )  # fmt: skip
        case "linear_context":
            tokens = c["sequences"] * c["length"]
            found = kernels.linear_prefill_s(c["heads"], tokens, c["sequences"], c["length"])
        case "linear_generation":
            found = kernels.linear_decode_s(c["heads"], c["sequences"])
        case _:
            found = kernels.all_reduce_s(2 * c["message_size"], c["num_gpus"])
    return np.asarray(found)


# ------------------------------------------------------------------------------- fitting


def fit_kernel(rows: Table) -> Fit:
    """Fit on all rows; error and band are those of rows whose shape group was held out."""
    parts = np.asarray([group % FOLDS for group in rows.groups])
    count = len(np.unique(rows.groups))
    parts = parts if count >= FOLDS else rows.groups  # few groups: leave one out
    off = np.zeros(len(rows.seconds))
    for fold in np.unique(parts):
        tested = parts == fold
        kernels = on_device(rows, _fit(rows.rows(~tested)))
        off[tested] = np.log(rows.seconds[tested] / predict(kernels, rows.rows(tested)))
    error = float(np.mean(np.abs(np.exp(-off) - 1.0)))
    return Fit(rows.name, rows.device, _fit(rows), error, len(off), count, band_of(off, parts))


def band_of(off: Floats, parts: NDArray[np.int64]) -> Band:
    """The band of these logarithms of measured over predicted, and how many bands without their fold hold."""
    low, high = np.quantile(off, QUANTILES)
    inside = 0
    for fold in np.unique(parts):
        rest = off[parts != fold]
        ends = np.quantile(rest, QUANTILES) if len(rest) else (low, high)
        inside += int(np.sum((off[parts == fold] >= ends[0]) & (off[parts == fold] <= ends[1])))
    return Band(float(np.exp(low)), float(np.exp(high)), inside / len(off))


def transferred(tables: Sequence[Table], fits: Mapping[tuple[str, str], Fit]) -> dict[str, Band]:
    """By kernel, the band of other devices' rows under the H100's coefficients: what a transfer is worth.
    Each device counts alike, and is covered by the band of the others."""
    found = {}
    for name in START:
        others = [rows for rows in tables if rows.name == name and rows.device != MEASURED_ON]
        if not others:
            continue
        value = fits[name, MEASURED_ON].value
        off = [np.log(rows.seconds / predict(on_device(rows, value), rows)) for rows in others]
        least = min(map(len, off))
        even = np.concatenate([np.quantile(one, np.linspace(0, 1, least)) for one in off])
        parts = np.repeat(np.arange(len(off)), least)
        found[name] = band_of(even, parts)
    return found


def on_device(rows: Table, value: Any) -> Kernels:
    """The kernels of a table's device with this one among them."""
    name = "linear_attention" if rows.name in PARTS else rows.name
    return replace(Kernels(load_hardware(rows.device), **START), **{name: value})


def _fit(rows: Table) -> Any:
    """Least absolute log error (smoothed), over the logarithms of the coefficients."""
    start = START["linear_attention" if rows.name in PARTS else rows.name]
    names = PARTS.get(rows.name) or tuple(field.name for field in fields(start))
    first = np.log([getattr(start, name) for name in names])

    def with_values(logs: Floats) -> Any:
        return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: Floats) -> Floats:
        return np.log(predict(on_device(rows, with_values(logs)), rows) / rows.seconds)

    reach = np.array([SHARPNESS_REACH if name.endswith("sharpness") else REACH for name in names])
    found = least_squares(
        residuals, first, bounds=(first - reach, first + reach), loss="soft_l1", f_scale=F_SCALE, max_nfev=400
    )
    return with_values(found.x)


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

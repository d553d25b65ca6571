"""A serving engine in a closed loop: so many requests at any time, all of one length, until all are done.

The asynchronous host layer of vLLM 0.30 is fitted to the output tokens a second of one workload and tested on
the other. A sequence costs its host a fifth of what it costs vLLM 0.12, because kernels hide the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness.fit.kernels import read_rows
from systems.backends.sim.replica import Arrival, Replica
from systems.costs.architecture import Architecture
from systems.costs.durations import BLOCK, Bounds
from systems.costs.forward import Forward, Host, StepTables
from systems.costs.kernels import Kernels

FILE = "serve_qwen3-8b_h100_vllm0.30.csv"
MODEL, DEVICE = "Qwen3-8B", "h100"
KV_TOKENS = 377_024  # that the engine reported
TOKEN_BUDGET, MAX_RUNNING = 8192, 1024  # its defaults on a device of 80 GB
LAYER_S = (
    1e-5  # small kernels of a layer: as vLLM 0.12's, which rows of one model cannot tell from the step's
)
WORKLOADS = ("chat", "balanced")
START = (4e-4, 1e-5)  # seconds a step, and a sequence
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One closed loop, and the output tokens a second that it reached."""

    workload: str
    prompt: int
    output: int
    concurrency: int
    requests: int
    tokens_per_s: float


def points(data: Path) -> list[Point]:
    columns = (
        "workload",
        "input_tokens",
        "output_tokens",
        "concurrency",
        "num_prompts",
        "output_tok_s",
    )
    return [
        Point(
            row["workload"], int(row["input_tokens"]), int(row["output_tokens"]), int(row["concurrency"]),
            int(row["num_prompts"]), float(row["output_tok_s"]),
        )
        for row in read_rows(data, FILE, columns)
    ]  # fmt: skip


def throughput(tables: StepTables, bounds: Bounds, point: Point) -> float:
    """Output tokens a second of the simulated replica."""
    replica = Replica(tables.costs(), bounds)
    begun = min(point.concurrency, point.requests)
    replica.add(0.0, [Arrival(number, point.prompt, point.output) for number in range(begun)])
    last = 0.0
    while (when := replica.next_s()) is not None:
        ended = replica.advance(when)
        last = max([last, *(end.time_s for end in ended)])
        more = min(len(ended), point.requests - begun)
        if more > 0:
            replica.add(when, [Arrival(begun + number, point.prompt, point.output) for number in range(more)])
            begun += more
    return point.requests * point.output / last


def predicted(model: Architecture, kernels: Kernels, host: Host, rows: Sequence[Point]) -> Floats:
    most = max(row.concurrency for row in rows)
    tables = StepTables(Forward(model, kernels, host, 1), most, TOKEN_BUDGET)
    bounds = Bounds(most, TOKEN_BUDGET, KV_TOKENS // BLOCK)
    return np.array([throughput(tables, bounds, row) for row in rows])


def fit_asynchronous(model: Architecture, kernels: Kernels, rows: Sequence[Point]) -> Host:
    """Seconds a step and a sequence."""
    measured = np.array([row.tokens_per_s for row in rows])

    def host(logs: Floats) -> Host:
        step_s, sequence_s = np.exp(logs).tolist()
        return Host(step_s, LAYER_S, sequence_s, 1.0)

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log(predicted(model, kernels, host(logs), rows) / measured))

    found = least_squares(
        residuals, np.log(START), loss="soft_l1", f_scale=0.05, diff_step=[0.02, 0.02], max_nfev=30
    )
    return host(found.x)

"""Public runs of a serving engine, request by request, put through the simulated replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness.fit.kernels import read_rows
from systems.backends.sim.replica import Arrival, Replica
from systems.costs.architecture import Architecture
from systems.costs.durations import Bounds
from systems.costs.forward import Forward, Host, StepTables
from systems.costs.hardware import Hardware
from systems.costs.kernels import AllReduce, Kernels
from systems.costs.memory import EngineMemory, kv_blocks

COLUMNS = ("request_id", "input_toks", "output_toks", "arrival_s", "last_token_s")
MAX_RUNNING, TOKEN_BUDGET = 128, 2048  # how the runs' engines were configured
FITTED_REQUESTS = 100  # of the run whose link is fitted; the rest test it
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Request:
    """One request of a run: when it came, and when its last token did."""

    input_tokens: int
    output_tokens: int
    arrival_s: float
    last_token_s: float


@dataclass(frozen=True)
class Deployment:
    """How a run served its model: tensor parallel, or replicas that share their experts."""

    file: str
    model: str
    tp: int = 1
    replicas: int = 1
    expert_ranks: int = 1


RUNS = (
    Deployment("run_rtxpro6000_vllm019_Llama-3.1-8B.csv", "Llama-3.1-8B"),
    Deployment("run_rtxpro6000_vllm019_Qwen3-32B.csv", "Qwen3-32B", tp=2),
    Deployment(
        "run_rtxpro6000_vllm019_Qwen3-30B-A3B-Instruct-2507.csv", "Qwen3-30B-A3B", replicas=2, expert_ranks=2
    ),
)
LINK_RUN = RUNS[1]


def read_run(data: Path, name: str) -> list[Request]:
    return [
        Request(
            int(row["input_toks"]),
            int(row["output_toks"]),
            float(row["arrival_s"]),
            float(row["last_token_s"]),
        )
        for row in read_rows(data, name, COLUMNS)
    ]


def simulate(
    requests: Sequence[Request], run: Deployment, model: Architecture, kernels: Kernels, host: Host
) -> Floats:
    """When the last token of each request comes, in seconds; requests go round the replicas."""
    forward = Forward(model, kernels, host, run.tp, run.expert_ranks)
    memory = EngineMemory(max_running=MAX_RUNNING, token_budget=TOKEN_BUDGET)
    blocks = kv_blocks(model, kernels.hardware, run.tp, memory, run.expert_ranks)
    costs = StepTables(forward, MAX_RUNNING, TOKEN_BUDGET).costs()
    bounds = Bounds(MAX_RUNNING, TOKEN_BUDGET, blocks)
    replicas = [Replica(costs, bounds) for _ in range(run.replicas)]
    ends = np.zeros(len(requests))
    for number, request in enumerate(requests):
        replica = replicas[number % run.replicas]
        for end in replica.advance(request.arrival_s):
            ends[end.id] = end.time_s
        replica.add(request.arrival_s, [Arrival(number, request.input_tokens, request.output_tokens)])
    for replica in replicas:
        while (when := replica.next_s()) is not None:
            for end in replica.advance(when):
                ends[end.id] = end.time_s
    return ends


def latency_errors(requests: Sequence[Request], ends: Floats) -> Floats:
    """Signed relative errors of the time from arrival to last token."""
    arrival = np.array([request.arrival_s for request in requests])
    measured = np.array([request.last_token_s for request in requests]) - arrival
    return np.asarray((ends - arrival) / measured - 1.0)


def makespan_error(requests: Sequence[Request], ends: Floats) -> float:
    return float(ends.max() / max(request.last_token_s for request in requests) - 1.0)


def fit_link(data: Path, model: Architecture, hardware: Hardware, kernels: Kernels, host: Host) -> AllReduce:
    """The all-reduce of devices without NVLink, from the first requests of one run."""
    requests = read_run(data, LINK_RUN.file)

    def with_link(logs: Floats) -> AllReduce:
        base, share = np.exp(logs).tolist()
        return replace(kernels.all_reduce, pcie_s=base, pcie=share)

    def residuals(logs: Floats) -> Floats:
        on = replace(kernels, hardware=hardware, all_reduce=with_link(logs))
        return latency_errors(requests, simulate(requests, LINK_RUN, model, on, host))[:FITTED_REQUESTS]

    first = np.log([2e-5, 0.3])
    found = least_squares(
        residuals,
        first,
        loss="soft_l1",
        f_scale=0.05,
        diff_step=[1e-2, 1e-2],
        bounds=(np.log([1e-6, 0.05]), np.log([1e-3, 1.0])),
    )
    return with_link(found.x)

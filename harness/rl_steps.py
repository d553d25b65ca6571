"""Published RL step times, predicted from few shared parameters: every row is reported, none is gated.

    on policy      generation + log-probabilities and update + overhead, one after the other on all devices
    off policy     the larger of generation and training, each on half of the devices (an assumption)

Generation is the simulated replica with lognormal lengths, cut at the published maximum, whose mean is the
published one; their spread is assumed. Fitted are the shares of the peak that training reaches (dense models,
experts), a factor on generation, and an overhead: four in all, found without the model that is predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from harness.fitting import read_rows
from systems.backends.sim.architecture import Architecture
from systems.backends.sim.forward import Forward, Host, StepTables
from systems.backends.sim.kernels import Kernels
from systems.backends.sim.memory import kv_blocks
from systems.backends.sim.replica import Arrival, Bounds, Replica
from workloads.groups import architecture

FILE = "rl_step_nemo.csv"
MODELS = {  # the rest (DeepSeek's attention, Nemotron's state spaces) is not modelled
    "LLAMA3.1_8B": "Llama-3.1-8B",
    "Qwen3-32B": "Qwen3-32B",
    "Qwen3-30B3A": "Qwen3-30B-A3B",
    "Qwen3-235B": "Qwen3-235B-A22B",
}
GPU = "H100"
NODE = 8  # devices that NVLink joins; wider replicas are not modelled
PROMPT = 200  # tokens, assumed
SIGMA = 0.8  # of log lengths, assumed
MAX_RUNNING, TOKEN_BUDGET = 512, 8192
SIMULATED_REPLICAS = 4  # of many alike; the slowest one counts
START = (0.35, 0.12, 1.3, 10.0)  # utilisation of dense models and of experts, generation's factor, overhead
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Published:
    """One row: a GRPO step of `responses` sequences on `gpus` devices."""

    label: str
    model: str
    on_policy: bool
    gpus: int
    responses: int
    mean_tokens: float
    most_tokens: int
    tp: int
    step_s: float


def published(data: Path) -> tuple[list[Published], list[str]]:
    """Rows that can be predicted, and labels of those that cannot."""
    columns = ("release", "gpu", "model", "policy", "max_seq_len", "avg_seq_len", "num_gpus", "gen_gbs",
               "gen_tp_pp", "step_time_s")  # fmt: skip
    rows, left = [], []
    for row in read_rows(data, FILE, columns):
        gpus = int(float(row["num_gpus"]))
        label = f"{row['release']} {row['model']} {row['policy'].lower()}, {gpus} {row['gpu']}"
        tp = int(row["gen_tp_pp"].strip("[]").split(",")[0])
        if row["gpu"] != GPU or row["model"] not in MODELS or tp > NODE:
            left.append(label)
            continue
        rows.append(
            Published(
                label, MODELS[row["model"]], row["policy"] == "On policy", gpus, int(float(row["gen_gbs"])),
                float(row["avg_seq_len"]), int(float(row["max_seq_len"])),
                tp, float(row["step_time_s"]),
            )
        )  # fmt: skip
    return rows, left


def lengths(mean: float, most: int, count: int, sigma: float, seed: str) -> list[int]:
    """Lognormal lengths, cut at `most`, whose expectation is `mean`."""
    normal = [random.Random(f"{seed}/{index}").gauss(0, 1) for index in range(count)]
    reference = np.random.default_rng(0).normal(size=20_000)

    def off(median_log: float) -> float:
        drawn = np.minimum(np.exp(median_log + sigma * reference), most)
        return float(drawn.mean()) - mean

    median_log = brentq(off, 0.0, math.log(most) + 6 * sigma)
    return [max(1, min(most, round(math.exp(median_log + sigma * z)))) for z in normal]


def generation_s(
    model: Architecture, kernels: Kernels, host: Host, tp: int, devices: int, drawn: Sequence[int],
    prompt: int = PROMPT,
) -> float:  # fmt: skip
    """Until the last of all sequences ends, dealt out to replicas of `tp` devices at once."""
    replicas = max(1, devices // tp)
    tables = StepTables(Forward(model, kernels, host, tp), MAX_RUNNING, TOKEN_BUDGET)
    bounds = Bounds(
        MAX_RUNNING, TOKEN_BUDGET, kv_blocks(model, kernels.hardware, tp, max_running=MAX_RUNNING)
    )
    slowest = 0.0
    for number in range(min(replicas, SIMULATED_REPLICAS)):
        replica = Replica(tables.costs(), bounds)
        replica.add(0.0, [Arrival(i, prompt, n) for i, n in enumerate(drawn[number::replicas])])
        while (when := replica.next_s()) is not None:
            for end in replica.advance(when):
                slowest = max(slowest, end.time_s)
    return slowest


@dataclass(frozen=True)
class Parts:
    """What a row's step is made of, before the shared parameters: seconds at a factor or share of 1."""

    generation_s: float
    training_s: float
    experts: bool
    on_policy: bool

    def step_s(self, parameters: Floats) -> float:
        dense, moe, factor, overhead = parameters
        generation, training = self.generation_s * factor, self.training_s / (moe if self.experts else dense)
        if self.on_policy:
            return float(generation + training + overhead)
        return float(max(generation, training) + overhead)


def parts_of(row: Published, kernels: Kernels, host: Host) -> Parts:
    """8 FLOPs a parameter and token: forward, backward, and one pass for log-probabilities."""
    model = architecture(row.model)
    share = row.gpus if row.on_policy else row.gpus // 2
    drawn = lengths(
        row.mean_tokens - PROMPT, row.most_tokens - PROMPT, row.responses, SIGMA, f"rl/{row.label}"
    )
    flops = 8.0 * model.params_active * row.responses * row.mean_tokens
    return Parts(
        generation_s(model, kernels, host, row.tp, share, drawn),
        flops / (share * kernels.hardware.bf16_flops),
        bool(model.experts),
        row.on_policy,
    )


def predict(rows: Sequence[Published], kernels: Kernels, host: Host) -> Floats:
    """Step times, each model's predicted with parameters fitted on the others."""
    parts = [parts_of(row, kernels, host) for row in rows]
    found = np.zeros(len(rows))
    for model in {row.model for row in rows}:
        known = [index for index, row in enumerate(rows) if row.model != model]
        parameters = fit([parts[i] for i in known], [rows[i].step_s for i in known])
        for index, row in enumerate(rows):
            if row.model == model:
                found[index] = parts[index].step_s(parameters)
    return found


def fit(parts: Sequence[Parts], measured: Sequence[float]) -> Floats:
    """Least absolute log error (smoothed)."""

    def residuals(logs: Floats) -> Floats:
        values = np.exp(logs)
        return np.asarray(np.log(np.array([one.step_s(values) for one in parts]) / np.array(measured)))

    low, high = np.log([0.02, 0.02, 0.5, 0.1]), np.log([0.7, 0.7, 3.0, 60.0])
    found = least_squares(residuals, np.log(START), loss="soft_l1", f_scale=0.1, bounds=(low, high))
    return np.asarray(np.exp(found.x))


# ------------------------------------------------------------------------------- the tail

VERL_FILE = "rl_step_verl.csv"
VERL_SYSTEM, VERL_MODEL = "verl colocated", "Qwen2.5-Math-7B"
VERL_MEAN, VERL_SIGMA = 2500.0, 1.2  # tokens; not published, assumed


def verl_generation(data: Path, kernels: Kernels, host: Host) -> list[tuple[int, float, float]]:
    """(devices, published, simulated) seconds of generation of the 7B run."""
    columns = ("system", "model", "gpus", "batch_prompts", "samples_per_prompt", "max_tokens", "gen_s")
    model, found = architecture("Qwen2.5-7B"), []
    for row in read_rows(data, VERL_FILE, columns):
        if (row["system"], row["model"]) == (VERL_SYSTEM, VERL_MODEL):
            count, gpus = int(row["batch_prompts"]) * int(row["samples_per_prompt"]), int(row["gpus"])
            drawn = lengths(VERL_MEAN, int(row["max_tokens"]), count, VERL_SIGMA, "verl")
            found.append((gpus, float(row["gen_s"]), _all_replicas_s(model, kernels, host, gpus, drawn)))
    return found


def _all_replicas_s(
    model: Architecture, kernels: Kernels, host: Host, gpus: int, drawn: Sequence[int]
) -> float:
    """The tail decides, so the replica with the longest sequence is the one to simulate."""
    longest = max(range(len(drawn)), key=lambda index: drawn[index])
    return generation_s(model, kernels, host, 1, 1, drawn[longest % gpus :: gpus])

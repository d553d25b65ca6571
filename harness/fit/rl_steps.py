"""Published RL step times, predicted from few shared parameters: every row is reported, none is gated.

    on policy      generation + log-probabilities and update, one after the other on all devices
    off policy     the larger of generation and training, on their parts of the devices; where several steps
                   may be off, so many steps are generated together, and the tail is theirs

Generation is the simulated replica with lognormal lengths, cut at the published maximum, whose mean is the
published one; their spread is assumed. Training is the product's own cost model with the published pipeline.
Fitted are the shares of the peak that training reaches (dense models, experts) and a factor on generation:
three in all, found without the model that is predicted. With all models the shares go into `training.toml`.
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

from harness.fit.kernels import read_rows
from systems.backends.sim.replica import Arrival, Replica
from systems.costs.architecture import BYTES_PER_PARAMETER, Architecture
from systems.costs.durations import Bounds
from systems.costs.forward import Forward, Host, StepTables
from systems.costs.kernels import Kernels
from systems.costs.memory import EngineMemory, kv_blocks
from systems.costs.training import TrainingCost, seconds_a_flop
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
# Of the devices, training's part where steps may be off policy (source: the recipes behind the rows,
# NVIDIA-NeMo/RL examples/configs/recipes/llm/performance: 16 of 24 nodes for 8 steps, half for 1)
TRAINING_PART = {1: 1 / 2, 8: 2 / 3}
START = (0.3, 1.2)  # utilisation of dense models, generation's factor
SHARES = (0.03, 0.06, 0.12, 0.25, 0.5)  # utilisation of models with experts that the fit starts from
AS_GOOD = 1.05  # in cost; a handful of rows cannot tell fits apart that are nearer
SAME = 0.05  # where fits of equal cost predict more apart than that, the rows do not identify a parameter
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Published:
    """One row: a GRPO step of `responses` sequences on `gpus` devices."""

    label: str
    model: str
    steps_off: int  # 0: on policy
    gpus: int
    responses: int
    mean_tokens: float
    most_tokens: int
    tp: int
    train_samples: int  # of a mini-batch
    train_width: int  # devices of a pipeline's stage
    train_stages: int
    step_s: float


def published(data: Path) -> tuple[list[Published], list[str]]:
    """Rows that can be predicted, and labels of those that cannot."""
    columns = ("release", "gpu", "model", "policy", "max_seq_len", "avg_seq_len", "num_gpus", "gen_gbs",
               "gen_tp_pp", "train_gbs", "train_tp_cp_ep_pp_vpp", "step_time_s")  # fmt: skip
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
                label, MODELS[row["model"]], _steps_off(row["policy"]), gpus, int(float(row["gen_gbs"])),
                float(row["avg_seq_len"]), int(float(row["max_seq_len"])),
                tp, int(float(row["train_gbs"])), *_pipeline(row["train_tp_cp_ep_pp_vpp"]),
                float(row["step_time_s"]),
            )
        )  # fmt: skip
    return rows, left


def _steps_off(policy: str) -> int:
    """'On policy', '1-step Off', '8-step Off'."""
    return 0 if policy == "On policy" else int(policy.partition("-")[0])


def _pipeline(layout: str) -> tuple[int, int]:
    """Devices of a stage, and stages: tensor and context parallelism first, stages last but one."""
    degrees = layout.strip("[]").split(",")
    return int(degrees[0]) * int(degrees[1]), int(degrees[-2])


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
    memory = EngineMemory(max_running=MAX_RUNNING, token_budget=TOKEN_BUDGET)
    bounds = Bounds(MAX_RUNNING, TOKEN_BUDGET, kv_blocks(model, kernels.hardware, tp, memory))
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
    fixed_s: float  # communication, whatever the share
    experts: bool
    on_policy: bool

    def step_s(self, parameters: Floats) -> float:
        dense, moe, factor = parameters
        generation = self.generation_s * factor
        training = self.training_s / (moe if self.experts else dense) + self.fixed_s
        if self.on_policy:
            return float(generation + training)
        return float(max(generation, training))


def parts_of(
    row: Published, kernels: Kernels, host: Host, byte_s: float, model: Architecture | None = None
) -> Parts:
    """`model` is looked up by name where it is not given."""
    model = model or architecture(row.model)
    training_gpus = round(row.gpus * TRAINING_PART[row.steps_off]) if row.steps_off else row.gpus
    generation_gpus = row.gpus - training_gpus if row.steps_off else row.gpus
    together = max(1, row.steps_off)
    made = lengths(
        row.mean_tokens - PROMPT, row.most_tokens - PROMPT, row.responses * together, SIGMA, f"rl/{row.label}"
    )
    drawn = made[: row.responses]
    read = [PROMPT + length for length in drawn]
    training = TrainingCost(
        model, kernels.hardware, 0.0, 1 / kernels.hardware.bf16_flops, byte_s, row.train_stages,
        row.train_width, row.train_samples,
    )  # fmt: skip
    return Parts(
        generation_s(model, kernels, host, row.tp, generation_gpus, made) / together,
        training.micro_s(sum(read), sum(n * (n + 1) / 2 for n in read), training_gpus),
        training.step_s(training_gpus) * row.responses / row.train_samples,
        bool(model.experts),
        not row.steps_off,
    )


@dataclass(frozen=True)
class Shares:
    """The share of the peak that training reaches, and how far off a step predicted without its model is.

    The error is of dense rows: no two of the models with experts identify the share for each other.
    """

    dense: float
    experts: float
    held_out_error_dense: float
    rows: int


def fit_shares(rows: Sequence[Published], parts: Sequence[Parts]) -> Shares:
    dense, experts, _ = fit(parts, [row.step_s for row in rows])[0]
    off = [
        abs(found.step_s / row.step_s - 1)
        for row, part, found in zip(rows, parts, predict(rows, parts), strict=True)
        if not part.experts
    ]
    return Shares(float(dense), float(experts), float(np.mean(off)), len(rows))


@dataclass(frozen=True)
class Predicted:
    """A step without its model. `low_s` and `high_s`: of all fits that are as good."""

    step_s: float
    low_s: float
    high_s: float

    @property
    def identified(self) -> bool:
        return self.high_s <= self.low_s * (1 + SAME)


def predict(rows: Sequence[Published], parts: Sequence[Parts]) -> list[Predicted]:
    """Step times, each model's predicted with parameters fitted on the others."""
    found: dict[int, Predicted] = {}
    for model in {row.model for row in rows}:
        known = [index for index, row in enumerate(rows) if row.model != model]
        fits = fit([parts[i] for i in known], [rows[i].step_s for i in known])
        for index, row in enumerate(rows):
            if row.model == model:
                steps = [parts[index].step_s(values) for values in fits]
                found[index] = Predicted(steps[0], min(steps), max(steps))
    return [found[index] for index in range(len(rows))]


def fit(parts: Sequence[Parts], measured: Sequence[float]) -> list[Floats]:
    """Least absolute log error (smoothed): the best of all starts, then those with the experts' share held at
    each of `SHARES` that are as good. Where these differ, the rows do not identify that share.
    """

    def residuals(logs: Floats) -> Floats:
        values = np.exp(logs)
        return np.asarray(np.log(np.array([one.step_s(values) for one in parts]) / np.array(measured)))

    def solved(start: tuple[float, float, float], experts: tuple[float, float]) -> tuple[float, Floats]:
        low, high = np.log([0.02, experts[0], 0.5]), np.log([0.7, experts[1], 3.0])
        found = least_squares(residuals, np.log(start), loss="soft_l1", f_scale=0.1, bounds=(low, high))
        return float(found.cost), np.asarray(np.exp(found.x))

    free = [solved((*START[:1], share, *START[1:]), (0.02, 0.7)) for share in SHARES]
    cost, best = min(free, key=lambda one: one[0])
    held = [solved((*START[:1], share, *START[1:]), (0.999 * share, 1.001 * share)) for share in SHARES]
    return [best, *(values for other, values in held if other <= cost * AS_GOOD)]


# ------------------------------------------------------------------------------- verl on H20

VERL_FILE = "rl_step_verl.csv"
VERL_SYSTEM, VERL_MODEL = "verl colocated", "Qwen2.5-Math-7B"
# Tokens; not published, assumed. At a mean of 2,500 the published updates would run at 0.9 of the peak.
VERL_MEAN, VERL_SIGMA = 1500.0, 1.2


VERL_STEPS = 16  # optimizer steps of a batch; the recipe's mini-batch of 32 prompts, inferred


def fit_communication(data: Path) -> float:
    """Seconds that an optimizer step communicates for each byte of parameters.

    The log-probability passes and updates of one batch on 32, 64 and 128 devices are work that the devices
    share, and a part that they do not; only the latter is taken.
    """
    rows = [
        (int(row["gpus"]), float(row["logp_s"]) + float(row["update_s"]))
        for row in read_rows(data, VERL_FILE, ("system", "model", "gpus", "logp_s", "update_s"))
        if (row["system"], row["model"]) == (VERL_SYSTEM, VERL_MODEL)
    ]
    gpus, seconds = (np.array(values, dtype=np.float64) for values in zip(*rows, strict=True))

    def residuals(logs: Floats) -> Floats:
        shared, fixed = np.exp(logs)
        return np.asarray(np.log((shared / gpus + fixed) / seconds))

    found = least_squares(residuals, np.log([seconds[0] * gpus[0], seconds[-1] / 2]))
    fixed_s = float(np.exp(found.x[1]))
    return fixed_s / VERL_STEPS / (architecture("Qwen2.5-7B").params_total * BYTES_PER_PARAMETER)


@dataclass(frozen=True)
class Verl:
    """The 7B run on `gpus` devices: seconds published and simulated."""

    gpus: int
    generation_s: tuple[float, float]
    training_s: tuple[float, float]  # log-probabilities and update


def verl(data: Path, kernels: Kernels, host: Host, share: float, byte_s: float) -> list[Verl]:
    """`share`: of the peak that training dense models reaches where it was fitted."""
    columns = ("system", "model", "gpus", "batch_prompts", "samples_per_prompt", "max_tokens", "gen_s",
               "logp_s", "update_s")  # fmt: skip
    model, found = architecture("Qwen2.5-7B"), []
    training = TrainingCost(model, kernels.hardware, 0.0, seconds_a_flop(kernels.hardware, share), byte_s)
    for row in read_rows(data, VERL_FILE, columns):
        if (row["system"], row["model"]) == (VERL_SYSTEM, VERL_MODEL):
            count, gpus = int(row["batch_prompts"]) * int(row["samples_per_prompt"]), int(row["gpus"])
            drawn = lengths(VERL_MEAN, int(row["max_tokens"]), count, VERL_SIGMA, "verl")
            read = [PROMPT + length for length in drawn]
            trained_s = training.micro_s(sum(read), sum(n * (n + 1) / 2 for n in read), gpus)
            trained_s += VERL_STEPS * training.step_s(gpus)
            generated_s = _all_replicas_s(model, kernels, host, gpus, drawn)
            published_s = float(row["logp_s"]) + float(row["update_s"])
            found.append(Verl(gpus, (float(row["gen_s"]), generated_s), (published_s, trained_s)))
    return found


def _all_replicas_s(
    model: Architecture, kernels: Kernels, host: Host, gpus: int, drawn: Sequence[int]
) -> float:
    """The tail decides, so the replica with the longest sequence is the one to simulate."""
    longest = max(range(len(drawn)), key=lambda index: drawn[index])
    return generation_s(model, kernels, host, 1, 1, drawn[longest % gpus :: gpus])

"""Published comparisons of whole systems, simulated by the runs of this project: are ratios right?

verl ran one RL job without a judge in five ways (`rl_verl_v1_modes.csv`): all devices together, in turn or at
once; training and rollout apart; and apart with training's devices that help rollout while they wait. The
nearest system here stands for each:

| mode                  | here                                  | devices                    |
|-----------------------|---------------------------------------|----------------------------|
| sync                  | colocated, staleness 0                | 32 for both                |
| separate_async        | disaggregated, staleness 1            | 16 train, 16 roll out      |
| separate no-switch    | disaggregated, staleness 1            | 16 train, 8 roll out       |
| separate switch       | pivot, staleness 1                    | the same, shifted          |

`colocate_async` generates and trains on the same devices at the same time, which no system here does. Lengths
are lognormal with the published mean and cap; their spread is assumed. Devices are H100s, which the source
does not say of every row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from harness.fit.checks import Check, Floats
from harness.fit.kernels import read_rows
from harness.results.log import Told
from harness.results.summary import Tally
from harness.runs.assemble import assemble
from harness.runs.runner import simulate
from harness.runs.spec import RunSpec
from workloads.groups import Cluster, Lengths, ModelGroup, Pair, Workload

FILE = "rl_verl_v1_modes.csv"
COLUMNS = (
    "model", "gpus", "mode", "trainer_gpus", "rollout_gpus", "batch_prompts", "responses", "max_response",
    "mean_response", "rollout_tp", "mini_batch_prompts", "steps", "hours",
)  # fmt: skip
MODES = Path(__file__).parent / "published.toml"  # by mode: the system that stands for it, and its bound
RATIOS = (
    ("sync", "separate_async"),
    ("separate no-switch", "separate switch"),
)  # how much longer the first is
STEPS, SEED = 6, 0
SIGMA = 0.8  # of log lengths, assumed
HARDWARE = "h100"


@dataclass(frozen=True)
class Mode:
    """One way, seconds an RL step as published and as simulated."""

    name: str
    published_s: float
    simulated_s: float


def modes(data: Path) -> dict[str, Mode]:
    """Every mode that a system here stands for."""
    found = {}
    stands_for = tomllib.loads(MODES.read_text())["mode"]
    for row in read_rows(data, FILE, COLUMNS):
        if row["mode"] not in stands_for:
            continue
        system, bound = stands_for[row["mode"]]["system"], stands_for[row["mode"]]["staleness"]
        tally = Tally()
        spec = RunSpec(
            system=system, backend="sim", steps=STEPS, seed=SEED, staleness=bound, group=group_of(row)
        )
        simulate(spec, assemble(spec), Told(tally.add))
        published_s = float(row["hours"]) * 3600 / int(row["steps"])
        simulated_s = tally.summary()["makespan_s"] / STEPS
        found[row["mode"]] = Mode(row["mode"], published_s, simulated_s)
    return found


def group_of(row: dict[str, str]) -> ModelGroup:
    """The job as a model group without a judge."""
    gpus, together = int(row["gpus"]), row["trainer_gpus"] == row["rollout_gpus"] == row["gpus"]
    train = gpus // 2 if together else int(row["trainer_gpus"])
    prompts, tp = int(row["batch_prompts"]), int(row["rollout_tp"])
    cap, mean = int(row["max_response"]), float(row["mean_response"])
    return ModelGroup(
        name="published", description=f"verl, {row['mode']}",
        pair=Pair(policy=row["model"], judge=row["model"], policy_tp=tp, judge_tp=tp),
        cluster=Cluster(gpus=gpus, train=train, rollout=gpus - train, reward=0, hardware=HARDWARE),
        workload=Workload(
            prompts=prompts, samples=int(row["responses"].split()[0]) // prompts, judge_calls=0,
            mini_batches=prompts // int(row["mini_batch_prompts"]),
        ),
        lengths=Lengths(response_median=_median(mean, cap), response_sigma=SIGMA, response_cap=cap),
    )  # fmt: skip


def _median(mean: float, cap: int) -> float:
    """The median of lognormal lengths whose mean is `mean` where they end at `cap`."""
    drawn = np.exp(SIGMA * np.random.default_rng(0).normal(size=100_000))
    return float(brentq(lambda median: np.minimum(median * drawn, cap).mean() - mean, 1.0, 2.0 * cap))


def ratio_checks(data: Path) -> Iterator[tuple[Check, Floats, Floats]]:
    """Seconds a step of every mode, and the ratios between them; reported, not gated."""
    found = modes(data)
    for mode in found.values():
        note = "signed error of a step; lengths and devices partly assumed; reported, not gated"
        check = Check(f"verl's {mode.name}, step", mode.simulated_s / mode.published_s - 1, None, None, note)
        yield check, np.array([mode.published_s]), np.array([mode.simulated_s])
    for slow, fast in RATIOS:
        published = found[slow].published_s / found[fast].published_s
        simulated = found[slow].simulated_s / found[fast].simulated_s
        note = f"published {published:.2f}, simulated {simulated:.2f}; reported, not gated"
        check = Check(f"verl's {slow} over {fast}", simulated / published - 1, None, None, note)
        yield check, np.array([published]), np.array([simulated])

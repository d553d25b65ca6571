"""How fast the simulator is, and how it grows; writes what was measured as JSON, and a figure.

    PYTHONPATH=. python tests/bench/simulator_speed.py --out results/published/simulator-speed-<date>.json

| figure  | is the time of                                                                       |
|---------|--------------------------------------------------------------------------------------|
| kernel  | 20 steps' sequences of moe-122b through eight replicas, without runtime and events    |
| run     | a whole run of 20 steps, events written, by system                                    |
| scale   | runs of 3 steps with the same load a GPU on more and more GPUs, pivot and colocated   |
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from live_bench import about

from harness.runs.costs import modelled
from systems.backends.sim.replica import Arrival, Replica
from systems.policies import SYSTEMS
from systems.types import SERVING, Role
from workloads.groups import load_group
from workloads.synthetic import SyntheticWorkload

MODEL, STEPS, SCALE_STEPS = "moe-122b", 20, 3
GPUS = (128, 256, 512, 1024)
REPLICAS = 4  # of each role
ROUNDS = 3
SECONDS = (2, 5, 10, 20)  # marked in the figure


def kernel() -> dict[str, float]:
    """The serving arithmetic alone."""
    group = load_group(MODEL)
    cost, recipe = modelled(group, real=False), group.workload
    workload = SyntheticWorkload(group.lengths, 0, recipe.samples, recipe.judge_calls, recipe.prompts)
    made = [workload.lengths_of(number) for number in range(STEPS * recipe.prompts)]
    for role in SERVING:
        cost.serving[role].costs()  # tables are made once
    began, sequences, tokens = time.perf_counter(), 0, 0
    for step in range(STEPS):
        part = made[step * recipe.prompts : (step + 1) * recipe.prompts]
        arrivals: dict[Role, list[Arrival]] = {role: [] for role in SERVING}
        for number, (prompt, responses, judged) in enumerate(part):
            for index, response in enumerate(responses):
                key = number * recipe.samples + index
                arrivals[Role.ROLLOUT].append(Arrival(key, prompt, response, number, prompt))
                arrivals[Role.REWARD].append(Arrival(key, prompt + response, judged[index][0]))
                tokens += response + judged[index][0]
        for role in SERVING:
            for index in range(REPLICAS):
                replica = Replica(cost.serving[role].costs(), cost.serving[role].bounds())
                share = arrivals[role][index::REPLICAS]
                replica.add(0.0, share)
                ended = 0
                while (when := replica.next_s()) is not None:
                    ended += len(replica.advance(when))
                assert ended == len(share)
                sequences += ended
    return {"seconds": time.perf_counter() - began, "sequences": sequences, "tokens": tokens}


def whole(system: str, steps: int, gpus: int, prompts: int) -> dict[str, Any]:
    """A run as a user starts it, in a process of its own: from its first event to its sealed manifest."""
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable, "-m", "harness.cli", "run", "--system", system, "--model", MODEL, "--steps",
            str(steps), "--gpus", str(gpus), "--set", f"workload.prompts={prompts}", "--results", root,
            "--quiet", "--wandb", "disabled",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (directory,) = Path(root).iterdir()
        manifest = json.loads((directory / "manifest.json").read_text())
        makespan_s = json.loads((directory / "summary.json").read_text())["makespan_s"]
        events = sum(1 for _ in (directory / "events.jsonl").open("rb"))
    return {"seconds": manifest["wall_s"], "events": events, "makespan_s": makespan_s}


def repeated(system: str, steps: int, gpus: int, prompts: int) -> dict[str, Any]:
    """The median of a few, with all of them: this machine is shared."""
    rows = [whole(system, steps, gpus, prompts) for _ in range(ROUNDS)]
    samples = [row["seconds"] for row in rows]
    return {**rows[0], "seconds": median(samples), "samples": samples}


def scale(system: str) -> list[dict[str, Any]]:
    prompts = load_group(MODEL).workload.prompts
    rows = []
    for gpus in GPUS:
        rows.append({"gpus": gpus, **repeated(system, SCALE_STEPS, gpus, prompts * gpus // GPUS[0])})
    first = rows[0]
    for row in rows:
        n_log_n = row["gpus"] * math.log(row["gpus"]) / (first["gpus"] * math.log(first["gpus"]))
        row["of_n_log_n"] = row["seconds"] / first["seconds"] / n_log_n
    return rows


def draw(result: dict[str, Any], out: Path) -> None:
    import matplotlib.pyplot as plt

    from paper_figures.style import label_kind, save, system_style, theme

    theme()
    figure, axis = plt.subplots(figsize=(4.2, 3.0), layout="constrained")
    rows = []
    for system, points in result["scale"].items():
        style = system_style(system)
        gpus, seconds = [p["gpus"] for p in points], [p["seconds"] for p in points]
        axis.plot(gpus, seconds, color=style.color, marker=style.marker, label=system)
        first = seconds[0] / (gpus[0] * math.log(gpus[0]))
        axis.plot(
            gpus, [first * n * math.log(n) for n in gpus], color=style.color, linestyle=":", linewidth=1
        )
        rows += [{"system": system, **point} for point in points]
    axis.set(
        xscale="log", yscale="log", xlabel="simulated GPUs, same load each", ylabel="seconds on one core"
    )
    axis.set_xticks(GPUS, [str(n) for n in GPUS])
    axis.set_yticks(SECONDS, [str(n) for n in SECONDS])
    axis.minorticks_off()
    axis.legend(title="dotted: n log n", fontsize=7, title_fontsize=7, frameon=False)
    label_kind(figure, f"measured, {result['date']}, {result['processor']}")
    save(figure, pd.DataFrame(rows), out.parent, out.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    result: dict[str, Any] = {**about(), "model": MODEL, "kernel": kernel()}
    print("kernel", result["kernel"], flush=True)
    result["run"] = {}
    for system in SYSTEMS:
        result["run"][system] = repeated(system, STEPS, GPUS[0], load_group(MODEL).workload.prompts)
        print(system, result["run"][system], flush=True)
    result["scale"] = {}
    for system in ("colocated", "pivot"):
        result["scale"][system] = scale(system)
        print(system, [(r["gpus"], round(r["seconds"], 1)) for r in result["scale"][system]], flush=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, given.out)


if __name__ == "__main__":
    main()

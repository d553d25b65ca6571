"""Our GRPO step beside TRL's, in one process, in turns; writes what was measured as JSON.

    python tests/bench/compare_trl.py --rounds 5 --out results/published/grpo-step-<date>.json

A round is one step of each on the same prompts, from the same checkpoint; who goes first alternates. The
first round warms up and is not counted. `grpo_step.py` says what is measured and what is not equal.

With two threads a step slows down many times over when anything else wants a core, so each step waits for
a quiet machine, and a round in which other processes used more than `--others` cores on average is kept in
the file as disturbed and repeated. That is decided by the load alone, never by a time. (Linux only;
elsewhere no round counts as disturbed.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import grpo_step
import torch
from grpo_step import OurStep, StepReport, TrlStep

ATTEMPTS_PER_ROUND = 6
QUIET_WINDOW_S = 3.0
QUIET_PATIENCE_S = 600.0
STAT = Path("/proc/stat")
SIDES: dict[str, type[OurStep] | type[TrlStep]] = {"ours": OurStep, "trl": TrlStep}


class Elsewhere:
    """How many cores other processes have kept busy since this was made."""

    def __init__(self) -> None:
        self._wall, self._others = time.perf_counter(), self._others_s()

    def cores(self) -> float | None:
        if self._others is None:
            return None
        others = self._others_s()
        assert others is not None
        return max(0.0, others - self._others) / (time.perf_counter() - self._wall)

    @staticmethod
    def _others_s() -> float | None:
        """CPU seconds of the whole machine, idle and waiting apart, without this process."""
        if not STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
        busy = user + nice + system + irq + softirq + steal
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def wait_until_quiet(limit: float) -> None:
    """Return once other processes leave the machine alone, or when patience ends."""
    deadline = time.perf_counter() + QUIET_PATIENCE_S
    while time.perf_counter() < deadline:
        window = Elsewhere()
        time.sleep(QUIET_WINDOW_S)
        cores = window.cores()
        if cores is None or cores <= limit:
            return


def one_side(side: str, seed: int, limit: float) -> dict[str, Any]:
    step = SIDES[side](seed)
    wait_until_quiet(limit)
    elsewhere = Elsewhere()
    report = step.run()
    cores = elsewhere.cores()
    _check(report)
    return {
        "seconds": {part: round(seconds, 4) for part, seconds in report.seconds.items()},
        "tokens": report.tokens(),
        "mean_reward": sum(report.rewards) / len(report.rewards),
        "others_cores": None if cores is None else round(cores, 3),
    }


def _check(report: StepReport) -> None:
    counts = {len(report.responses), len(report.critiques), len(report.rewards)}
    if counts != {grpo_step.STEP_SAMPLES} or report.weights_before == report.weights_after:
        raise RuntimeError("this was not a whole GRPO step")


def one_round(seed: int, ours_first: bool, limit: float) -> dict[str, Any]:
    order = ("ours", "trl") if ours_first else ("trl", "ours")
    made = {side: one_side(side, seed, limit) for side in order}
    ratio = made["ours"]["seconds"]["total"] / made["trl"]["seconds"]["total"]
    disturbed = any((one["others_cores"] or 0.0) > limit for one in made.values())
    found = {"seed": seed, "first": order[0], "disturbed": disturbed, "ratio": round(ratio, 4)}
    return {**found, "ours": made["ours"], "trl": made["trl"]}


def compare(rounds: int, limit: float) -> list[dict[str, Any]]:
    """Rounds until enough of them were undisturbed; all of them, in the order they were run."""
    one_round(seed=0, ours_first=True, limit=limit)
    made: list[dict[str, Any]] = []
    while sum(not one["disturbed"] for one in made) < rounds and len(made) < ATTEMPTS_PER_ROUND * rounds:
        made.append(one_round(len(made) + 1, len(made) % 2 == 0, limit))
        last = made[-1]
        print(
            f"round {last['seed']}: ours {last['ours']['seconds']['total']:.2f} s, "
            f"TRL {last['trl']['seconds']['total']:.2f} s, ratio {last['ratio']:.3f}"
            f"{', disturbed' if last['disturbed'] else ''}",
            file=sys.stderr,
            flush=True,
        )
    return made


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [one for one in rounds if not one["disturbed"]]
    if not counted:
        raise SystemExit("every round was disturbed by other processes; nothing was measured")
    medians = {
        side: {part: round(median(one[side]["seconds"][part] for one in counted), 4) for part in _parts(one)}
        for side in SIDES
        for one in counted[:1]
    }
    ratios = [one["ratio"] for one in counted]
    return {
        "counted_rounds": len(counted),
        "median_s": medians,
        "ratios": ratios,
        "median_ratio": round(median(ratios), 4),
    }


def _parts(one: dict[str, Any]) -> list[str]:
    return list(one["ours"]["seconds"])


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "trl", "accelerate")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="undisturbed rounds to measure")
    parser.add_argument("--others", type=float, default=0.15, help="cores that others may use in a round")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(grpo_step.THREADS)
    rounds = compare(options.rounds, options.others)
    learning = grpo_step.GROUP.learning
    record = {
        "kind": "measured",
        "what": (grpo_step.__doc__ or "").strip(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "threads": grpo_step.THREADS,
        "step": {
            "model": grpo_step.GROUP.name,
            "prompts": grpo_step.PROMPTS,
            "samples": grpo_step.SAMPLES,
            "mini_batch_samples": grpo_step.MINI_SAMPLES,
            "trl_micro_batch_samples": grpo_step.TRL_MICRO_SAMPLES,
            "trl_judge_rows": grpo_step.TRL_JUDGE_ROWS,
            **learning.model_dump(),
        },
        **summary(rounds),
        "others_cores_limit": options.others,
        "rounds": rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("median_s", "ratios", "median_ratio")}))


if __name__ == "__main__":
    main()

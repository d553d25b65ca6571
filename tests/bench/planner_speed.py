"""What a decision of pivot's planners costs the control process: building the view, and asking.

    PYTHONPATH=. python tests/bench/planner_speed.py --out results/published/planner-speed-<date>.json

Every decision of a simulated run is timed, on one core, while the run goes on: 20 steps at 128 GPUs, and
2 steps at 4,096 with eight times the paper's prompts a step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from live_bench import about

from harness.results.log import Told
from harness.runs.assemble import assemble
from harness.runs.runner import simulate
from harness.runs.spec import resolve
from systems import plans
from systems.policies.planners import PLANNERS
from systems.runtime import Runtime

MODEL = "moe-122b"
CASES: dict[int, tuple[int, tuple[str, ...]]] = {128: (20, ()), 4096: (2, ("workload.prompts=1024",))}


def timed(gpus: int, planner: str) -> list[float]:
    """Seconds of every decision of a run: its view and the policy's answer."""
    steps, settings = CASES[gpus]
    spec = resolve(
        system="pivot", model=MODEL, backend=None, steps=steps, seed=0, staleness=2, gpus=gpus,
        settings=settings, planner=planner,
    )  # fmt: skip
    took: list[float] = []
    view, ask = Runtime.view, plans.ask
    building = 0.0

    def timed_view(runtime: Runtime) -> Any:
        nonlocal building
        began = time.perf_counter()
        seen = view(runtime)
        building = time.perf_counter() - began
        return seen

    def timed_ask(*asked: Any) -> Any:
        began = time.perf_counter()
        answer = ask(*asked)
        took.append(building + time.perf_counter() - began)
        return answer

    Runtime.view, plans.ask = timed_view, timed_ask  # type: ignore[method-assign]
    try:
        simulate(spec, assemble(spec), Told(lambda _: None))
    finally:
        Runtime.view, plans.ask = view, ask  # type: ignore[method-assign]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = []
    for gpus in CASES:
        for planner in PLANNERS:
            took = timed(gpus, planner)
            cuts = quantiles(took, n=100)
            rows.append(
                {
                    "gpus": gpus, "planner": planner, "decisions": len(took), "p50_ms": cuts[49] * 1e3,
                    "p99_ms": cuts[98] * 1e3, "max_ms": max(took) * 1e3,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]))
    if out is not None:
        out.write_text(
            json.dumps({**about(), "kind": "measured", "model": MODEL, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""What live workers cost beside the same work without them; writes what was measured as JSON.

    python tests/bench/live_bench.py --out results/published/live-bench-<date>.json

| figure      | is the time of                                  | beside                                 |
|-------------|-------------------------------------------------|----------------------------------------|
| rollout     | sequences through the runtime and one worker    | the same in a bare engine's loop       |
| publish     | 100 MB into the store, mapped by 3 workers      | one memcpy of as many bytes            |
| role switch | a tiny worker taking another role, all phases   | -                                      |
| pairs       | whole runs of two systems, in turns             | the simulator's prediction of each     |

Sides of a pair take turns in one session, who goes first alternates, and ratios are within a round. No round
is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.results.record import processor
from harness.runs.assemble import assemble
from harness.runs.measure_live import QUICK, calibrate
from harness.runs.replay import replay
from harness.runs.runner import run
from harness.runs.spec import RunSpec, cores, resolve, with_gpus
from harness.runs.tiny_models import PACKAGE, policy_sampler
from systems.backends.live.store import ParameterStore, floats, layout_of
from systems.backends.live.training import together
from systems.estimates.estimator import Estimator
from systems.loop.clock import run_live
from systems.model.engine import Engine, Request
from systems.model.serving import ServingModel
from systems.model.weights import load_model, to_standard
from systems.policies.disaggregated import Nothing
from systems.runtime import Runtime
from systems.staleness import Admission
from systems.types import How, Lease, LeaseState, Placement, Plan, Role, Sample, Sequence, Shift, View
from tests.conftest import MemoryLog
from workloads.groups import load_group
from workloads.hops import task
from workloads.hops.workload import HopsWorkload

WARM_UP = 8  # prompts
PROMPTS = 32  # of 8 samples: about a second a side, so that the machine drifts little between the two
BYTES = 100_000_000
MODEL = "tiny-dense"


def live_spec(system: str, gpus: int, seed: int = 0, steps: int = 1) -> RunSpec:
    return resolve(
        system=system, model=MODEL, backend="live", steps=steps, seed=seed, staleness=None, gpus=gpus,
        settings=(),
    )  # fmt: skip


# ------------------------------------------------------------------------------- rollout


class OneRollout:
    """A policy that gives all devices to rollout replicas."""

    name, default_staleness, time_shares = "one-rollout", 0, True

    def begin(self, layout: Any) -> Nothing:
        return Nothing()

    def plan(self, view: View, memory: Nothing) -> tuple[Plan, Nothing]:
        return Plan(tuple(Placement(Role.ROLLOUT, (d.id,)) for d in view.layout.devices)), memory


class RolloutBench:
    """One worker and a bare engine, with the same sequences."""

    def __init__(self) -> None:
        self.group = with_gpus(load_group(MODEL), 1, "live", time_shares=True)
        self.workload = HopsWorkload(seed=0)
        assert self.group.real is not None
        policy = load_model(PACKAGE / self.group.real.policy)
        model = ServingModel(policy.config, to_standard(policy))
        self.engine = Engine(model, policy_sampler(self.group, 0), task.STOP, self.group.live.max_running)
        torch.set_num_threads(1)

    def sequences(self, prompts: int) -> list[Sequence]:
        made = []
        for number in range(prompts * 8):
            sample: Any = Sample(number, group=None)  # type: ignore[arg-type]
            made.append(Sequence(number, sample, Role.ROLLOUT, self.workload.prompt(number // 8), key=number))
        return made

    def bare(self, prompts: int = PROMPTS) -> tuple[int, float]:
        """(tokens, seconds) of the engine in a loop."""
        limit = self.group.learning.max_new_tokens
        requests = [Request(s.id, s.key, s.prompt.tokens, limit) for s in self.sequences(prompts)]
        began = time.perf_counter()
        self.engine.run(requests)
        return sum(len(request.tokens) for request in requests), time.perf_counter() - began

    def rounds(self, count: int) -> list[dict[str, float]]:
        """Paired: the runtime's turn and the bare engine's, who goes first alternates."""
        return run_live(self._rounds(count))

    async def _rounds(self, count: int) -> list[dict[str, float]]:
        parts = assemble(live_spec("pivot", 1))
        found: list[dict[str, float]] = []
        await parts.backend.prepare()
        runtime = Runtime(
            parts.layout, parts.recipe, OneRollout(), parts.backend, MemoryLog(),
            Admission(parts.recipe), Estimator(parts.prior, parts.recipe),
        )  # fmt: skip
        async with runtime:
            for number in range(count):
                for side in ("bare", "runtime") if number % 2 else ("runtime", "bare"):
                    # Another process than the last one has cold caches: each side warms up, untimed.
                    if side == "bare":
                        self.bare(WARM_UP)
                        tokens, took_s = self.bare()
                        bare = tokens / took_s
                    else:
                        await self.through(runtime, WARM_UP)
                        tokens, took_s = await self.through(runtime)
                        ours = tokens / took_s
                found.append({"runtime_tokens_per_s": ours, "bare_tokens_per_s": bare, "ratio": ours / bare})
        return found

    async def through(self, runtime: Runtime, prompts: int = PROMPTS) -> tuple[int, float]:
        """(tokens, seconds) of the same sequences through the runtime."""
        sequences = self.sequences(prompts)
        began = time.perf_counter()
        runtime.serving.submit(sequences)
        for _ in sequences:
            await runtime.serving.finished.get()
        took_s = time.perf_counter() - began
        return sum(sequence.length for sequence in sequences), took_s


# ------------------------------------------------------------------------------- publishing


def publish_rounds(count: int) -> list[dict[str, float]]:
    """A worker's publish of 100 MB, mapped by 3 others, and a memcpy of as many bytes."""
    return run_live(_publish_rounds(count))


async def _publish_rounds(count: int) -> list[dict[str, float]]:
    """The control process writes, as a training worker would, and three workers map and answer."""
    from systems.backends.live.cluster import LocalCluster

    state = {"weights": torch.rand(BYTES // 4)}
    layout, target = layout_of(state), torch.rand(BYTES // 4)
    store, cluster = ParameterStore(), LocalCluster(range(3))
    found = []
    try:
        await cluster.prepare()
        for number in range(count + 4):  # the first ones make the memory that is used again later
            took: dict[str, float] = {}
            for side in ("copy", "publish") if number % 2 else ("publish", "copy"):
                began = time.perf_counter()
                if side == "copy":
                    target.copy_(state["weights"])
                else:
                    segment = store.blank(floats(layout))
                    segment.write(state)
                    store.put("x", number, segment, layout)
                    for worker in cluster.workers.values():
                        store.acquire("x", number, worker.device)
                    await together(
                        worker.ask("map", [segment], segment=segment.number, layout=layout)
                        for worker in cluster.workers.values()
                    )
                    for worker in cluster.workers.values():
                        store.release(worker.device, "x", but=number)
                took[side] = time.perf_counter() - began
            row = {"publish_s": took["publish"], "memcpy_s": took["copy"]}
            row["allowed_s"] = 1.5 * took["copy"] + 0.010
            found.append(row)
    finally:
        cluster.close()
        store.close()
    return found[4:]


# ------------------------------------------------------------------------------- role switches


def switch_times(cycles: int) -> list[dict[str, Any]]:
    """Seconds of warm role switches of one worker, drained before: park to ready."""
    return run_live(_switch_times(cycles))


async def _switch_times(cycles: int) -> list[dict[str, Any]]:
    backend = assemble(live_spec("pivot", 1)).backend
    ways, found = [Role.ROLLOUT, Role.REWARD, Role.TRAIN], []
    await backend.prepare()
    try:
        previous: tuple[Placement, ...] = ()
        for number in range(3 * (cycles + 1)):
            target = (Placement(ways[number % 3], (0,)),)
            began = time.perf_counter()
            async for _ in backend.shift(Shift(number, previous, target, How.MIGRATE), 0):
                pass
            took_s = time.perf_counter() - began
            if number > 3:  # every role was taken once: from now on it is warm
                found.append({"from": previous[0].role, "to": target[0].role, "seconds": took_s})
            lease = Lease(target[0], number, LeaseState.ACTIVE, 0)
            if target[0].role is not Role.TRAIN:
                backend.serving(lease).close()
            previous = target
    finally:
        backend.close()
    return found


# ------------------------------------------------------------------------------- pairs of runs


def pairs(
    systems: tuple[str, str], seeds: int, steps: int, said: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Both systems on 2 devices, seed by seed, in turns, and what the simulator predicts for each."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        for seed in range(seeds):
            # A shared machine drifts by tens of percent from minute to minute: measure what it costs now.
            costs = calibrate([MODEL], 2, lambda line: None, QUICK)
            row: dict[str, Any] = {"seed": seed, "calibration": costs.groups[MODEL].model_dump(mode="json")}
            for system in systems if seed % 2 == 0 else systems[::-1]:
                result = run(live_spec(system, 2, seed, steps), Path(root))
                again = replay(result.directory, costs)
                summary = result.summary
                assert not summary["oversubscribed"]
                assert not again.differing
                row[system] = {
                    "makespan_s": summary["makespan_s"],
                    "simulated_makespan_s": sum(again.simulated_s),
                    "step_s": list(again.recorded_s),
                    "simulated_step_s": list(again.simulated_s),
                    "tokens_per_s": summary["tokens_per_s"]["total"],
                    "realised_staleness_mean": summary["realised_staleness"]["mean"],
                    "weights_sha256": summary["weights_sha256"],
                }
            first, second = (row[system] for system in systems)
            row["ratio"] = second["makespan_s"] / first["makespan_s"]
            row["simulated_ratio"] = second["simulated_makespan_s"] / first["simulated_makespan_s"]
            said(f"seed {seed}: {row['ratio']:.3f} measured, {row['simulated_ratio']:.3f} simulated")
            found.append(row)
    return found


def about() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kind": "measured",
        "processor": processor(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": cores(),
        "model": MODEL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    result: dict[str, Any] = about()
    rollout = RolloutBench().rounds(2 * given.rounds)
    result["rollout"] = {"rounds": rollout, "median_ratio": median(row["ratio"] for row in rollout)}
    print("rollout", result["rollout"]["median_ratio"], flush=True)
    publish = publish_rounds(given.rounds)
    result["publish"] = {
        "rounds": publish,
        "median_of_allowed": median(row["publish_s"] / row["allowed_s"] for row in publish),
    }
    print("publish", result["publish"]["median_of_allowed"], flush=True)
    switches = switch_times(given.rounds)
    result["role_switch"] = {"switches": switches, "median_s": median(s["seconds"] for s in switches)}
    print("switch", result["role_switch"]["median_s"], flush=True)
    rows = pairs(("colocated", "pivot"), given.seeds, given.steps, lambda line: print(line, flush=True))
    result["pairs"] = {
        "systems": ["colocated", "pivot"],
        "devices": 2,
        "steps": given.steps,
        "seeds": rows,
        "median_ratio": median(row["ratio"] for row in rows),
        "median_simulated_ratio": median(row["simulated_ratio"] for row in rows),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

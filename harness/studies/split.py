"""The best static split of a cluster, by search: what `--split auto` gives to a system with fixed pools.

A split is tried by simulating the request with it on `SEEDS`, which no reported run uses. From the best split
of the steady fluid optimum and from the template, single blocks (and pairs of them) move between two roles as
long as the mean makespan falls. Where there are few splits all of them are tried, and the answer is the
optimum; else it is a local one, and says so. What was found is kept with its evidence, and found at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.errors import UsageError
from harness.results.log import Told
from harness.results.record import RUNS
from harness.results.summary import Tally
from harness.runs.assemble import assemble
from harness.runs.code import code_sha256
from harness.runs.runner import simulate
from harness.runs.spec import RunSpec
from systems.costs.fluid import steady
from systems.machine.files import replace_file
from systems.types import Role

AUTO = "auto"
SEEDS = (5, 6, 7)
MOST_EXHAUSTIVE = 24  # splits that are all tried
SPLITS = RUNS.parent / "splits"  # where what was found is kept

Blocks = tuple[int, int, int]  # train, rollout, reward


@dataclass(frozen=True)
class Found:
    """The best split in devices, whether all splits were tried, and the mean makespan (s) of each tried."""

    train: int
    rollout: int
    reward: int
    exhaustive: bool
    tried: tuple[tuple[str, float], ...]

    @property
    def text(self) -> str:
        return f"{self.train}/{self.rollout}/{self.reward}"

    def describe(self) -> str:
        """One line for people."""
        kind = "the optimum of all" if self.exhaustive else "a local optimum among"
        return (
            f"--split auto: {self.text} (train/rollout/reward), {kind} {len(self.tried)} splits tried on "
            f"seeds {', '.join(map(str, SEEDS))}"
        )


def best_split(spec: RunSpec, kept: Path = SPLITS, told: Callable[[str], None] = lambda _: None) -> Found:
    """Search, or what an equal search has found. Raises `UsageError` where splits cannot be simulated."""
    if spec.on.measured:
        raise UsageError("--split auto: splits are tried by simulation; give one as TRAIN/ROLLOUT/REWARD")
    if spec.policy.time_shares:
        raise UsageError(f"--split auto: {spec.system} has no fixed split")
    path = kept / f"{spec.digest[:16]}-{code_sha256()[:16]}.json"
    if path.exists():
        return _read(path)
    found = _search(spec, told)
    kept.mkdir(parents=True, exist_ok=True)
    record = {"spec": spec.to_json(), "seeds": SEEDS, "exhaustive": found.exhaustive, "best": found.text,
              "mean_makespan_s": dict(found.tried)}  # fmt: skip
    replace_file(path, json.dumps(record, indent=1) + "\n")
    return found


def _read(path: Path) -> Found:
    record = json.loads(path.read_text())
    train, rollout, reward = map(int, record["best"].split("/"))
    tried = tuple(record["mean_makespan_s"].items())
    return Found(train, rollout, reward, record["exhaustive"], tried)


def with_split(spec: RunSpec, split: tuple[int, int, int]) -> RunSpec:
    """The same request with another static split, in devices (train, rollout, reward)."""
    train, rollout, reward = split
    cluster = spec.group.cluster.model_copy(update={"train": train, "rollout": rollout, "reward": reward})
    return spec.model_copy(update={"group": spec.group.model_copy(update={"cluster": cluster})})


def _search(spec: RunSpec, told: Callable[[str], None]) -> Found:
    parts = assemble(spec)
    layout, block = parts.layout, parts.layout.block
    total, least = len(layout.devices) // block, -(-layout.train_min // block)
    judged = bool(parts.recipe.judge_calls)
    known: dict[Blocks, float] = {}

    def legal(split: Blocks) -> bool:
        return split[0] >= least and split[1] >= 1 and split[2] >= judged and sum(split) == total

    def seconds(split: Blocks) -> float:
        if split not in known:
            train, rollout, reward = (blocks * block for blocks in split)
            tried = with_split(spec, (train, rollout, reward))
            known[split] = fmean(_makespan_s(tried.with_seed(seed)) for seed in SEEDS)
            told(f"{train}/{rollout}/{reward}: {known[split]:.1f} s")
        return known[split]

    everything = [
        (train, rollout, total - train - rollout)
        for train in range(least, total + 1)
        for rollout in range(1, total - train + 1)
        if legal((train, rollout, total - train - rollout))
    ]
    exhaustive = len(everything) <= MOST_EXHAUSTIVE
    if exhaustive:
        best = min(everything, key=seconds)
    else:
        train, rollout, reward = (
            layout.template[r] // block for r in (Role.TRAIN, Role.ROLLOUT, Role.REWARD)
        )
        fluid = steady(parts.cost, layout, parts.recipe, parts.prior).static_split
        starts = [start for start in dict.fromkeys((fluid, (train, rollout, reward))) if legal(start)]
        best = min(starts or everything[:1], key=seconds)
        while True:
            better = min(filter(legal, _neighbours(best)), key=seconds, default=best)
            if seconds(better) >= seconds(best):
                break
            best = better
    train, rollout, reward = (blocks * block for blocks in best)
    tried = tuple(("/".join(str(b * block) for b in split), s) for split, s in known.items())
    return Found(train, rollout, reward, exhaustive, tried)


def _neighbours(split: Blocks) -> Iterator[Blocks]:
    """One or two blocks from one role to another."""
    for giver in range(3):
        for taker in range(3):
            for blocks in (1, 2):
                if giver != taker:
                    change = [blocks * ((role == taker) - (role == giver)) for role in range(3)]
                    yield split[0] + change[0], split[1] + change[1], split[2] + change[2]


def _makespan_s(spec: RunSpec) -> float:
    tally = Tally()
    simulate(spec, assemble(spec), Told(tally.add))
    summary: dict[str, Any] = tally.summary()
    return float(summary["makespan_s"])

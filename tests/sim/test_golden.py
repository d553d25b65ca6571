"""Golden decision logs: what each system decides on fixed small runs, line by line.

A change here is a change of behaviour: look at the difference, say why in the commit, and write the files
again with `UPDATE_GOLDEN=1 pytest tests/sim/test_golden.py`. That fails, because what writes its own answer
tests nothing: run it again without.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from systems.backends.faults import Fault, FaultyBackend, Noise
from systems.policies import SYSTEMS
from tests.conftest import SMALL, MemoryLog, simulate, small_spec

GOLDEN = Path(__file__).parent / "golden"


def decisions(log: MemoryLog) -> str:
    """One line a decision: time, devices by role, and the reason."""
    lines = []
    for event in log.of("decision"):
        devices: dict[str, list[int]] = {}
        for role, owned in event["placements"]:
            devices.setdefault(role, []).extend(owned)
        who = " ".join(f"{role}={_ranges(sorted(ids))}" for role, ids in sorted(devices.items()))
        lines.append(f"{event['t'] / 1e9:10.3f} {who} | {event['why']}")
    return "\n".join(lines) + "\n"


def _ranges(ids: list[int]) -> str:
    parts: list[list[int]] = []
    for one in ids:
        if parts and one == parts[-1][-1] + 1:
            parts[-1].append(one)
        else:
            parts.append([one])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


UNHASHED = ("t", "view", "memory", "floor", "steady")  # in which are moments, estimates and costs


def digest(log: MemoryLog) -> str:
    """Of everything that happened, in order. Moments count to the millisecond and estimates not at all: the
    last bit of a float may differ between processors."""
    sha = hashlib.sha256()
    for event in log.events:
        kept = {key: value for key, value in event.items() if key not in UNHASHED}
        sha.update(json.dumps([round(event["t"] / 1e6), kept], sort_keys=True).encode())
    return sha.hexdigest()


def faulty(backend: Any) -> FaultyBackend:
    noise = Noise(lost=0.01, doubled=0.05, late=0.05, failed_load=0.1)
    return FaultyBackend(backend, (Fault(60.0, 2), Fault(150.0, 5)), noise, seed=1)


def test_events_are_those_that_were_reviewed() -> None:
    """Every event of small runs of all systems, without faults and with them."""
    lines = []
    for system in SYSTEMS:
        for model, staleness, faults in (
            ("dense-9b", 0, False), ("dense-9b", 2, False), ("moe-30b", 1, False), ("dense-9b", 1, True),
        ):  # fmt: skip
            spec = small_spec(system, model, steps=4, gpus=None, staleness=staleness)
            log, _, _ = simulate(spec, faulty) if faults else simulate(spec)
            about = f"{system} {model} staleness {staleness}{' with faults' if faults else ''}"
            lines.append(f"{about} {len(log.events)} {digest(log)}")
    check_reviewed("events.txt", lines)


def check_reviewed(name: str, lines: list[str]) -> None:
    path, said = GOLDEN / name, "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(said)
        pytest.fail(f"{path.name} was written anew: look at what changed and run again")
    assert said == path.read_text()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("model", ["dense-9b", "moe-30b"])
def test_decisions_are_those_that_were_reviewed(system: str, model: str) -> None:
    log, _, _ = simulate(small_spec(system, model, steps=4, gpus=None))
    path = GOLDEN / f"{system}-{model}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(decisions(log))
        pytest.fail(
            f"{path.name} was written anew: look at the difference, and run again without UPDATE_GOLDEN"
        )
    assert decisions(log) == path.read_text()


def test_pivot_really_shifts_between_all_roles() -> None:
    log, tally, _ = simulate(small_spec("pivot", "dense-9b", steps=4, gpus=None))
    moved = {
        (source[0], target[0])
        for event in log.of("shift.began")
        for source in event["sources"]
        for target in event["targets"]
        if source[0] != target[0]
    }
    assert {source for source, _ in moved} == {"rollout", "reward", "train"}
    assert {target for _, target in moved} == {"rollout", "reward", "train"}
    assert tally.migrations > 0


@pytest.mark.parametrize("system", [name for name, policy in SYSTEMS.items() if policy.time_shares])
@pytest.mark.parametrize("gpus", [1, 2])
def test_systems_that_time_share_run_on_fewer_devices_than_roles(system: str, gpus: int) -> None:
    _, tally, _ = simulate(small_spec(system, "dense-9b", steps=2, gpus=gpus))
    assert len(tally.steps) == 2


SHIFTY: dict[str, dict[str, Any]] = {  # runs in which a planner has to decide in other situations
    "long and drifting": {
        "steps": 8,
        "settings": (*SMALL, "lengths.drift=0.2", "lengths.response_median=3000"),
    },
    "heavy judge": {"steps": 5, "settings": (*SMALL, "workload.judge_calls=3")},
    "light judge": {"steps": 5, "settings": (*SMALL, "lengths.judge_at_1k=300")},
    "two devices": {"steps": 4, "gpus": 2},
    "three devices": {"steps": 4, "gpus": 3},
    "wide spread": {"steps": 3, "settings": ("workload.prompts=8", "workload.mini_batches=2")},
    "cheap shifts": {"steps": 5, "settings": (*SMALL, "costs.shift=0.05")},
    "dear shifts": {"steps": 5, "settings": (*SMALL, "costs.shift=8")},
    "slow training": {"steps": 5, "settings": (*SMALL, "costs.training=0.2")},
    "many devices": {"steps": 2, "gpus": 32},
}


def test_a_planner_decides_as_was_reviewed_in_other_situations() -> None:
    lines = []
    for name, asked in SHIFTY.items():
        for staleness in (0, 2):
            spec = small_spec("pivot", "dense-9b", **{"gpus": None, **asked}, staleness=staleness)
            log, _, _ = simulate(spec)
            lines.append(f"pivot {name} staleness {staleness} {len(log.events)} {digest(log)}")
    check_reviewed("situations.txt", lines)

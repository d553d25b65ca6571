"""Golden decision logs: what each system decides on fixed small runs, line by line.

A change here is a change of behaviour: look at the difference, say why in the commit, and write the files
again with `UPDATE_GOLDEN=1 pytest tests/sim/test_golden.py`. That fails, because what writes its own answer
tests nothing: run it again without.
"""

import os
from pathlib import Path

import pytest

from systems.policies import SYSTEMS
from tests.conftest import MemoryLog, simulate, small_spec

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
    }
    assert {("rollout", "reward"), ("reward", "rollout")} <= moved
    assert any("train" in pair for pair in moved)
    assert tally.migrations > 0


@pytest.mark.parametrize("system", [name for name, policy in SYSTEMS.items() if policy.time_shares])
@pytest.mark.parametrize("gpus", [1, 2])
def test_systems_that_time_share_run_on_fewer_devices_than_roles(system: str, gpus: int) -> None:
    _, tally, _ = simulate(small_spec(system, "dense-9b", steps=2, gpus=gpus))
    assert len(tally.steps) == 2

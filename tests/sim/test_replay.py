"""A run in virtual time, replayed, is the run itself; and the policy decides what it decided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from harness.errors import UsageError
from harness.results.record import RunDirectory
from harness.runs.replay import replay
from harness.runs.runner import run
from systems.policies import SYSTEMS
from systems.policies.pivot import Pivot
from systems.types import How, Plan, View
from tests.conftest import SMALL, simulate, small_spec


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_simulated_run_is_its_own_replay(system: str, tmp_path: Path) -> None:
    result = replay(run(small_spec(system, steps=4, seed=5), tmp_path).directory)
    assert result.differing == ()
    assert result.decisions > 0
    assert result.simulated_s == result.recorded_s
    assert result.makespan_error == 0.0


def test_with_lost_workers_too(tmp_path: Path) -> None:
    faulty = (*SMALL, "faults.losses=4", "faults.within_s=200")
    recorded = run(small_spec("pivot", steps=3, settings=faulty), tmp_path)
    assert recorded.summary["device_losses"] > 0
    result = replay(recorded.directory)
    assert result.simulated_s == result.recorded_s


def test_a_cosimulated_run_is_its_own_replay(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    quick = ("workload.prompts=4", "learning.max_new_tokens=48")
    spec = small_spec("pivot", "tiny-dense", steps=3, settings=quick)
    result = replay(run(spec, tmp_path).directory)
    assert result.differing == ()
    assert result.simulated_s == result.recorded_s


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_policy_was_shown_is_in_the_log(system: str) -> None:
    shown: list[View] = []

    class Watched(SYSTEMS[system]):  # type: ignore[misc]
        def plan(self, view: View, memory: object) -> tuple[Plan, object]:
            shown.append(view)
            plan: tuple[Plan, object] = super().plan(view, memory)
            return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SYSTEMS, system, Watched)
        simulate(small_spec(system, steps=2))
    assert shown
    for view in shown:
        read = json.loads(orjson.dumps(view.record(), option=orjson.OPT_NON_STR_KEYS))
        assert View.from_record(read, view.layout, view.recipe) == view
    for key in shown[0].record():
        with pytest.raises((LookupError, TypeError)):
            View.from_record({k: v for k, v in read.items() if k != key}, view.layout, view.recipe)


def test_a_policy_that_changed_its_mind_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(small_spec("pivot", steps=3), tmp_path).directory
    usual = Pivot.plan

    def other(self: Pivot, view: object, memory: object) -> tuple[Plan, object]:
        plan, kept = usual(self, view, memory)  # type: ignore[arg-type]
        return replace(plan, how=How.FINISH), kept

    monkeypatch.setattr(Pivot, "plan", other)
    result = replay(directory)
    assert len(result.differing) == result.decisions > 0


def test_only_complete_runs(tmp_path: Path) -> None:
    directory = run(small_spec("pivot", steps=1), tmp_path).directory
    manifest = {**json.loads((directory.path / "manifest.json").read_text()), "status": "interrupted"}
    with pytest.raises(UsageError, match="is interrupted; only a complete run"):
        replay(RunDirectory(directory.path, manifest))

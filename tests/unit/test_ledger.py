"""What a results folder has of a suite, in which order the rest is run, and how long it will take."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.results.log import EventLog
from harness.results.record import RunDirectory, list_runs
from harness.runs.code import code_sha256
from harness.studies import sweep as sweeps
from harness.studies.suite import Cell, Suite, load_suite
from harness.studies.sweep import START_S, Forecast, Ledger, alone_in, interleaved, ledger, seal_left
from systems.machine import processes


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Eight cells: two systems, two groups, two seeds."""
    path = tmp_path_factory.mktemp("suite") / "study.toml"
    path.write_text(
        'steps = 2\nseeds = [1, 2]\n[[grid]]\nsystem = ["colocated", "pivot"]\n'
        'model = ["dense-9b", "moe-30b"]\n'
        'staleness = 0\n[grid.set]\n"workload.prompts" = 8\n'
    )
    return load_suite(str(path))


def recorded(root: Path, cell: Cell, name: str, status: str, **more: Any) -> Path:
    """A run's record as a sweep finds it."""
    path = root / f"2026120{name}"
    path.mkdir(parents=True)
    asked = cell.spec.manifest()
    manifest = {"run": path.name, "status": status, **asked, "code_sha256": code_sha256(), **more}
    (path / "manifest.json").write_text(json.dumps(manifest))
    if status == "complete":
        (path / "DONE").touch()
    return path


def test_a_cell_is_done_failed_left_or_of_other_code(suite: Suite, tmp_path: Path) -> None:
    done, failed, invalid, other, left, both, *rest = suite.cells
    recorded(tmp_path, done, "1", "complete")
    recorded(tmp_path, failed, "2", "failed")
    recorded(tmp_path, invalid, "3", "invalid")
    recorded(tmp_path, other, "4", "complete", code_sha256="another")
    recorded(tmp_path, left, "5", "running")
    recorded(tmp_path, both, "6", "failed")
    recorded(tmp_path, both, "7", "complete")
    recorded(tmp_path, rest[0], "8", "interrupted")
    elsewhere = recorded(tmp_path, rest[1], "9", "complete") / "manifest.json"
    elsewhere.write_text(elsewhere.read_text().replace(rest[1].id, "a cell of another suite"))
    found = ledger(suite, tmp_path)
    assert set(found.done) == {done.id, both.id}
    assert set(found.failed) == {failed.id, invalid.id}
    assert set(found.other_code) == {other.id}
    assert found.left == ["20261205"]
    assert [cell.id for cell in found.to_do(suite.cells, retry=False)] == [
        other.id, left.id, rest[0].id, rest[1].id,
    ]  # fmt: skip
    assert len(found.to_do(suite.cells, retry=True)) == 6
    any_code = ledger(suite, tmp_path, any_code=True)
    assert set(any_code.done) == {done.id, both.id, other.id}
    assert not any_code.other_code


def test_the_newest_run_of_a_cell_counts(suite: Suite, tmp_path: Path) -> None:
    cell = suite.cells[0]
    recorded(tmp_path, cell, "1", "complete")
    recorded(tmp_path, cell, "2", "complete")
    assert ledger(suite, tmp_path).done[cell.id]["run"] == "20261202"


def test_other_codes_failures_are_nobodys(suite: Suite, tmp_path: Path) -> None:
    recorded(tmp_path, suite.cells[0], "1", "failed", code_sha256="another")
    assert not ledger(suite, tmp_path).failed


def test_systems_of_one_comparison_run_next_to_each_other(suite: Suite) -> None:
    order = interleaved(suite.cells, "seed")
    assert sorted(cell.id for cell in order) == sorted(cell.id for cell in suite.cells)
    pairs = [cell.pair for cell in order]
    assert all(pairs[i] == pairs[i + 1] for i in range(0, len(pairs), 2))
    assert set(Counter(pairs).values()) == {2}
    assert interleaved(suite.cells, "seed") == order
    orders = {tuple(cell.id for cell in interleaved(suite.cells, str(seed))) for seed in range(20)}
    assert len(orders) > 10, "the order is random"
    firsts = {interleaved(suite.cells, str(seed))[0].spec.system for seed in range(20)}
    assert len(firsts) == 2, "no system always goes first"


def test_what_ended_without_a_seal_is_sealed_and_what_runs_is_not_touched(
    suite: Suite, tmp_path: Path
) -> None:
    path = recorded(tmp_path, suite.cells[0], "1", "running")
    log = EventLog(path / "events.jsonl", lambda event: None)
    found = ledger(suite, tmp_path)
    with pytest.raises(UsageError, match="is a cell of this suite and is being run"):
        seal_left(found, tmp_path)
    log.close()
    seal_left(found, tmp_path)
    (manifest,) = list_runs(tmp_path)
    assert manifest["status"] == "interrupted"
    assert manifest["reason"] == "its process ended before it was sealed"
    assert "without a seal of its own" in str(RunDirectory.open(tmp_path, path.name).unverified)


def test_one_sweep_at_a_time_works_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "LOCK_PATIENCE_S", 0.2)
    with alone_in(tmp_path / "runs") as lock:
        assert os.fstat(lock)
        with pytest.raises(UsageError, match="another sweep works in"), alone_in(tmp_path / "runs"):
            pass
    with alone_in(tmp_path / "runs"):
        pass
    with (tmp_path / "runs" / ".sweep.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--results"), alone_in(tmp_path / "file" / "runs"):
        pass


# ------------------------------------------------------------------------------- how long


def test_equal_runs_foretell_each_other_first(suite: Suite, tmp_path: Path) -> None:
    cell = suite.cells[0]
    for name, wall_s in (("1", 10.0), ("2", 30.0), ("3", 20.0)):
        recorded(tmp_path, cell, name, "complete", wall_s=wall_s)
    recorded(tmp_path, cell, "4", "failed", wall_s=1000.0)
    assert Forecast(tmp_path).wall_s(cell.spec) == pytest.approx(START_S + 20.0)


def test_alike_runs_foretell_by_their_sequences(suite: Suite, tmp_path: Path) -> None:
    one = next(cell for cell in suite.cells if cell.spec.system == "pivot")
    longer = load_of(suite, tmp_path, steps=4)
    recorded(tmp_path / "runs", longer, "1", "complete", wall_s=40.0)
    assert Forecast(tmp_path / "runs").wall_s(one.spec) == pytest.approx(START_S + 20.0)
    far = load_of(suite, tmp_path, steps=40)
    assert Forecast(tmp_path / "runs").wall_s(far.spec) != pytest.approx(START_S + 400.0), (
        "ten times is not alike"
    )


def test_without_any_run_a_rate_foretells(suite: Suite, tmp_path: Path) -> None:
    spec = suite.cells[0].spec
    sequences = 2 * 8 * 16 * 2
    assert Forecast(tmp_path).wall_s(spec) == pytest.approx(START_S + sequences * spec.on.sequence_s)


def load_of(suite: Suite, folder: Path, steps: int) -> Cell:
    text = suite.path.read_text().replace("steps = 2", f"steps = {steps}")
    path = folder / f"steps-{steps}.toml"
    path.write_text(text)
    return next(cell for cell in load_suite(str(path)).cells if cell.spec.system == "pivot")


def test_an_empty_ledger_leaves_everything_to_do(suite: Suite) -> None:
    assert Ledger().to_do(suite.cells, retry=False) == list(suite.cells)


def test_a_cell_whose_code_was_changed_meanwhile_failed(suite: Suite, tmp_path: Path) -> None:
    """Its run is complete, and of other code than the one that the sweep began with."""
    cell = suite.cells[0]
    with alone_in(tmp_path) as lock:
        crew = sweeps._Crew(tmp_path, lock, processes.command("harness.cli.cell"), "disabled")
        try:
            assert crew.run(cell).status == "complete"
            crew._code = "what it was before"
            outcome = crew.run(cell)
        finally:
            crew.close()
    assert (outcome.status, outcome.why) == ("failed", "the code was changed while the sweep ran")
    assert outcome.run

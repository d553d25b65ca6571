"""Sweeps as a user starts them: killed and resumed, failing in part, refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.cli import main
from harness.results.record import list_runs
from harness.studies.suite import load_suite
from harness.studies.sweep import Forecast, interleaved, ledger
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
BENCH = [sys.executable, "-m", "harness.cli"]
SMALLER = (
    "workload.prompts=4",
    "workload.samples=4",
    "workload.mini_batches=1",
    "workload.micro_batch_samples=16",
)


def suite_of(seeds: int, settings: tuple[str, ...] = SMALLER, systems: str = '["colocated", "pivot"]') -> str:
    given = "\n".join(f'"{key}" = {value}' for key, value in (setting.split("=") for setting in settings))
    return f"""\
steps = 2
seeds = {list(range(seeds))}
[[grid]]
system = {systems}
model = "dense-9b"
staleness = ["default", 0]
gpus = 8
[grid.set]
{given}
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "WANDB_MODE": "disabled"}


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, cwd=cwd, env=environment())


def results(root: Path) -> dict[str, str]:
    """Event digests of complete runs by cell; none may be there twice."""
    complete = [manifest for manifest in list_runs(root) if manifest["status"] == "complete"]
    times = Counter(manifest["cell"] for manifest in complete)
    assert set(times.values()) <= {1}, "a cell was run twice"
    return {manifest["cell"]: manifest["events_sha256"] for manifest in complete}


def killed(command: list[str], cwd: Path, after_s: float, how: signal.Signals) -> int:
    """Start it, and end it `after_s` later; its exit code."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
        return process.wait(60)


@pytest.mark.parametrize(
    ("seeds", "kills"), [(2, 3), pytest.param(8, 10, marks=pytest.mark.slow)], ids=["6 cells", "24 cells"]
)
def test_a_killed_sweep_gives_what_an_uninterrupted_one_gives(seeds: int, kills: int, tmp_path: Path) -> None:
    """SIGKILL and Ctrl-C by turns, at random moments."""
    cells = 3 * seeds
    (tmp_path / "study.toml").write_text(suite_of(seeds))
    assert len(load_suite(str(tmp_path / "study.toml")).cells) == cells
    whole = bench("sweep", "study.toml", "--results", "whole", "--jobs", "2", "--quiet", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.startswith(f"{cells} cells: {cells} run, 0 kept, 0 failed")

    rng, done = random.Random(0), [0]
    command = [*BENCH, "sweep", "study.toml", "--results", "parts", "--jobs", "2", "--quiet", "--resume"]
    for attempt in range(kills):
        how = signal.SIGINT if attempt % 2 else signal.SIGKILL
        killed(command, tmp_path, rng.uniform(1.0, 2.6), how)
        done.append(sum(m["status"] == "complete" for m in list_runs(tmp_path / "parts")))
    assert done == sorted(done)
    assert kills < 10 or done[-1] > 0, "some cells end between two kills"
    last = bench(*command[3:], cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    assert {m["status"] for m in list_runs(tmp_path / "parts")} <= {"complete", "interrupted"}
    kept = bench(*command[3:], cwd=tmp_path)
    assert kept.stdout.startswith(f"{cells} cells: 0 run, {cells} kept, 0 failed")


def test_cells_are_kept_only_if_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(suite_of(1, systems='"colocated"'))
    assert bench("sweep", "study.toml", "--quiet", cwd=tmp_path).returncode == 0
    again = bench("sweep", "study.toml", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("bench: 1 of 1 cells are in results/runs already: --resume keeps them")
    planned = json.loads(bench("plan", "study.toml", "--json", cwd=tmp_path).stdout)
    assert (planned["cells"], planned["to_do"], planned["rows"][0]["done"]) == (1, 0, 1)
    listed = bench("list", "runs", "--suite", "study.toml", "--json", cwd=tmp_path)
    assert [run["system"] for run in json.loads(listed.stdout)] == ["colocated"]


def test_what_fails_stops_nothing_else_and_is_tried_again_on_request(tmp_path: Path) -> None:
    """Where the summary of one system cannot be written, its cells fail and the others are run."""
    (tmp_path / "study.toml").write_text(suite_of(2))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import systems.policies.pivot as pivot\n"
        "def plan(self, view, memory):\n    raise ValueError('out of ideas')\n"
        "pivot.Pivot.plan = plan\n"
    )
    env = {**environment(), "PYTHONPATH": f"{broken}:{ROOT}"}

    def sweep(*more: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [*BENCH, "sweep", "study.toml", "--jobs", "2", "--quiet", *more]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)

    first = sweep(env=env)
    assert first.returncode == 4, first.stderr
    assert first.stdout.startswith("6 cells: 2 run, 0 kept, 4 failed")
    assert first.stdout.count("ValueError: out of ideas") == 4
    assert first.stderr.strip() == "bench: 4 of 6 cells failed"
    resumed = sweep("--resume", "--json", env=environment())
    rows: list[dict[str, Any]] = json.loads(resumed.stdout)
    assert resumed.returncode == 4
    assert sorted(row["why"] for row in rows if row["status"] == "complete") == ["kept", "kept"]
    assert all(
        "ValueError: out of ideas" in row["why"] and row["why"].endswith("(earlier)")
        for row in rows
        if row["status"] == "failed"
    )
    retried = sweep("--resume", "--retry", "failed", env=environment())
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert retried.stdout.startswith("6 cells: 4 run, 2 kept, 0 failed")


def test_fail_fast_starts_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(suite_of(3, systems='"pivot"'))
    (tmp_path / "sitecustomize.py").write_text(
        "import systems.policies.pivot as pivot\ndef plan(self, view, memory):\n    raise ValueError('no')\n"
        "pivot.Pivot.plan = plan\n"
    )
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [*BENCH, "sweep", "study.toml", "--fail-fast", "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert found.returncode == 4
    assert found.stdout.startswith("6 cells: 0 run, 0 kept, 1 failed, 5 not started")


@pytest.mark.slow
def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(suite_of(20))
    command = [*BENCH, "sweep", "study.toml", "--quiet"]
    first = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "results/runs/.sweep.lock").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        second = bench("sweep", "study.toml", "--quiet", "--resume", cwd=tmp_path)
    finally:
        first.send_signal(signal.SIGINT)
        code = first.wait(60)
    assert second.returncode == 2
    assert "another sweep works in results/runs" in second.stderr
    assert code == 130


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "headlin"], "unknown suite 'headlin'; did you mean 'headline'?"),
        (["sweep", "bad.toml"], "bad.toml:1: stesp: unknown key 'stesp'; did you mean 'steps'?"),
        (["sweep", "headline", "--jobs", "0"], "--jobs 0: at least 1"),
        (
            ["sweep", "live.toml", "--jobs", "2"],
            "runs of this suite are measured and would disturb each other",
        ),
        (["sweep", "headline", "--retry", "failed"], "--retry: only with --resume"),
        (["sweep", "headline", "--resume", "--retry", "fialed"], "unknown --retry 'fialed'"),
        (["plan", "headline", "--system", "pivot"], "not both"),
        (["plan"], "give a suite, or --system and --model"),
        (["compare", "colocated", "pivot"], "no complete run in results/runs"),
        (["claims", "--claims", "none.toml"], "none.toml: No such file"),
        (["export", "nothing", "--format", "csv"], "no run matches 'nothing'"),
        (["export", "nothing", "--format", "xml"], "unknown format 'xml'"),
        (["list", "models", "--seed", "3"], "--seed: only for 'bench list runs'"),
        (["list", "runs", "--status", "compelte"], "did you mean 'complete'?"),
    ],
)
def test_refusals_are_one_line_before_anything_runs(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("stesp = 2\nseeds = 1\n")
    (tmp_path / "live.toml").write_text(
        'seeds = 1\n[[grid]]\nsystem = "colocated"\nmodel = "tiny-dense"\nbackend = "live"\ngpus = 2\n'
    )
    found = bench(*arguments, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not list_runs(tmp_path / "results/runs")


def test_systems_of_one_comparison_run_next_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(suite_of(6, SMALL))
    suite = load_suite(str(tmp_path / "study.toml"))
    order = interleaved(suite.cells, "a")
    assert sorted(cell.id for cell in order) == sorted(cell.id for cell in suite.cells)
    assert order != list(suite.cells)
    assert order != interleaved(suite.cells, "b")
    assert order == interleaved(suite.cells, "a")
    for start in range(0, len(order), 3):
        assert len({cell.spec.seed for cell in order[start : start + 3]}) == 1


def test_a_forecast_learns_from_runs_like_it(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(suite_of(2, systems='"colocated"'))
    suite = load_suite(str(tmp_path / "study.toml"))
    cell = suite.cells[0]
    guessed = Forecast(tmp_path / "results/runs").wall_s(cell.spec)
    bench("run", *cell.request, "--quiet", cwd=tmp_path)
    (manifest,) = list_runs(tmp_path / "results/runs")
    learned = Forecast(tmp_path / "results/runs").wall_s(cell.spec)
    assert guessed is not None
    assert learned == pytest.approx(0.9 + manifest["wall_s"])
    assert manifest["cell"] == cell.id, "a run that asks for the same is that cell"
    assert set(ledger(suite, tmp_path / "results/runs").done) == {cell.id}


class Said(NamedTuple):
    """What a command did."""

    returncode: Any
    stdout: str
    stderr: str


def test_a_study_from_its_suite_to_its_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands on results: exit codes, text and JSON."""
    monkeypatch.chdir(tmp_path)

    def bench(*arguments: str) -> Said:
        code: Any = 0
        try:
            main([*arguments])
        except SystemExit as end:
            code = end.code
        return Said(code, *capsys.readouterr())

    (tmp_path / "study.toml").write_text(suite_of(6).replace('["default", 0]', "0"))
    (tmp_path / "claims.toml").write_text(
        'frozen_in = "abc"\n[[claim]]\nid = "gain"\ntext = "a gain"\nsource = "abstract"\nlow = 50\n'
        'high = 60\nsuite = "study.toml"\n[claim.ratio]\nof = "pivot,staleness=0"\nto = "colocated"\n'
    )
    assert bench("sweep", "study.toml", "--jobs", "2", "--quiet").returncode == 0
    sides = ["colocated", "pivot,staleness=0", "--suite", "study.toml"]
    text = bench("compare", *sides)
    assert text.returncode == 0, text.stderr
    assert "throughput (simulated)" in text.stdout
    assert "by seed  0: " in text.stdout
    (found,) = json.loads(bench("compare", *sides, "--json").stdout)
    assert (found["n"], found["kind"], len(found["contender"]["runs"])) == (6, "simulated", 6)

    failing = bench("compare", *sides, "--fail-on", "throughput<900%")
    assert failing.returncode == 1
    assert failing.stderr.startswith("bench: throughput<900%: pivot,staleness=0 is ")
    passing = bench("compare", *sides, "--fail-on", "throughput<-99%", "--fail-on", "speed>900%")
    assert passing.returncode == 0, passing.stderr

    shutil.copytree(tmp_path / "results/runs", tmp_path / "before")
    again = bench("compare", "before:colocated", "colocated")
    assert again.returncode == 0, again.stderr
    assert "inconclusive" in again.stdout

    judged = bench("claims", "--claims", "claims.toml")
    assert judged.returncode in (0, 1), judged.stderr
    assert "gain: a gain" in judged.stdout
    assert "runs        12; --json lists them" in judged.stdout
    (row,) = json.loads(bench("claims", "--claims", "claims.toml", "--json").stdout)
    assert row["verdict"] in ("partly", "not reproduced")
    assert (judged.returncode == 1) == (row["verdict"] == "not reproduced")
    assert "--claims claims.toml" in row["command"]
    for path in (tmp_path / "results/runs").glob("*/manifest.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "code_sha256": "another"}))
    stale = json.loads(bench("claims", "--claims", "claims.toml", "--json").stdout)
    assert stale[0]["verdict"] == "not tested"
    planned = json.loads(bench("plan", "study.toml", "--json").stdout)
    assert (planned["to_do"], planned["other_code"]) == (12, 12)
    kept = bench("sweep", "study.toml", "--resume", "--any-code", "--quiet")
    assert kept.stdout.startswith("12 cells: 0 run, 12 kept, 0 failed")

    run = found["contender"]["runs"][0]
    exported = bench("export", run, "--format", "csv", "--out", "out")
    assert (exported.returncode, len(exported.stdout.splitlines())) == (0, 4)
    assert bench("export", run, "--format", "csv", "--out", "study.toml").returncode == 2


def test_a_cell_that_dies_before_its_run_begins_is_on_record(tmp_path: Path) -> None:
    """Killed by the system, or unable to start: it failed, with the reason, and is not simply run again."""
    (tmp_path / "study.toml").write_text(suite_of(1, systems='"colocated"'))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'harness.cli.cell' in sys.orig_argv:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [*BENCH, "sweep", "study.toml", "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert found.returncode == 4
    assert "its process was killed by SIGKILL" in found.stdout
    (manifest,) = list_runs(tmp_path / "results/runs")
    assert (manifest["status"], manifest["reason"]) == ("failed", "its process was killed by SIGKILL")
    again = bench("sweep", "study.toml", "--quiet", cwd=tmp_path)
    assert (again.returncode, "--retry failed" in again.stderr) == (2, True)
    assert (
        bench("sweep", "study.toml", "--quiet", "--resume", "--retry", "failed", cwd=tmp_path).returncode == 0
    )


def test_an_interrupted_run_says_so_when_it_is_shown(tmp_path: Path) -> None:
    command = [*BENCH, "run", "--system", "colocated", "--model", "dense-9b", "--steps", "50", "--quiet"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    runs = tmp_path / "results/runs"
    while not any(b"version.published" in path.read_bytes() for path in runs.glob("*/events.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    shown = bench("show", "colocated", cwd=tmp_path)
    assert shown.stdout.startswith("interrupted after ")
    assert " of 50 steps" in shown.stdout.splitlines()[0]
    assert json.loads(bench("show", "colocated", "--json", cwd=tmp_path).stdout)["status"] == "interrupted"

"""How commands end when their surroundings fail them: readers that leave, signals, full disks, odd paths."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.results.record import list_runs, read_manifest
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
BENCH = [sys.executable, "-P", "-m", "harness.cli"]
SMALL_ARGS = [part for setting in SMALL for part in ("--set", setting)]
RUN = ["run", "--system", "pivot", "--model", "dense-9b", "--staleness", "0", *SMALL_ARGS]
TINY = ["run", "--system", "pivot", "--model", "tiny-dense", "--steps", "1", "--set", "workload.prompts=2"]
LONG = ["run", "--system", "colocated", "--model", "dense-9b", "--steps", "400", "--results", "runs"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "WANDB_MODE": "disabled", **more}


def bench(*arguments: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    more.setdefault("env", environment())
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, cwd=cwd, **more)


def only_manifest(root: Path) -> dict[str, Any]:
    (manifest,) = list_runs(root)
    return manifest


# ------------------------------------------------------------------------------- readers that leave


def with_reader_gone(command: list[str], cwd: Path, stream: str, after: bytes = b"") -> tuple[int, bytes]:
    """Run it, and leave once `stream` has said `after`; its exit code, and what the other stream said."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    gone, other = (process.stderr, process.stdout) if stream == "stderr" else (process.stdout, process.stderr)
    assert gone is not None
    assert other is not None
    while after and after not in gone.readline():
        pass
    gone.close()
    said = other.read()
    return process.wait(60), said


@pytest.mark.parametrize("after", [b"", b"step "])
def test_a_run_does_not_need_anybody_who_reads_its_progress(after: bytes, tmp_path: Path) -> None:
    command = [*BENCH, *RUN, "--steps", "4", "--results", "runs"]
    code, said = with_reader_gone(command, tmp_path, "stderr", after)
    assert (code, only_manifest(tmp_path / "runs")["status"]) == (0, "complete")
    assert b"makespan" in said


def test_nor_does_a_sweep(tmp_path: Path) -> None:
    settings = "\n".join(f'"{key}" = {value}' for key, value in (s.split("=") for s in SMALL))
    (tmp_path / "study.toml").write_text(
        'steps = 1\nseeds = [1, 2]\n[[grid]]\nsystem = ["colocated", "pivot"]\nmodel = "dense-9b"\n'
        f"staleness = 0\ngpus = 8\n[grid.set]\n{settings}\n"
    )
    code, said = with_reader_gone([*BENCH, "sweep", "study.toml", "--results", "runs"], tmp_path, "stderr")
    assert (code, said) == (0, b"4 cells: 4 run, 0 kept, 0 failed\n")


def test_a_reader_who_saw_enough_does_not_change_the_exit_code(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        assert bench(*RUN, "--steps", "1", "--seed", seed, "--results", "runs", cwd=tmp_path).returncode == 0
    for arguments, code in (
        (["list", "runs"], 0),
        (["list", "models"], 0),
        (["show", "s1"], 0),
        (["compare", "seed=1", "seed=2", "--allow", "seeds", "--fail-on", "throughput>-99%"], 1),
    ):
        where = [] if arguments[1] == "models" else ["--results", "runs"]
        assert with_reader_gone([*BENCH, *arguments, *where], tmp_path, "stdout")[0] == code, arguments
    code, said = with_reader_gone([*BENCH, *RUN, "--steps", "1", "--results", "other"], tmp_path, "stdout")
    assert code == 0, said
    assert only_manifest(tmp_path / "other")["status"] == "complete"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_odd_encodings_change_nothing_of_that(encoding: str, tmp_path: Path) -> None:
    """A stream that cannot say a character spells it out, and one that nobody reads goes nowhere."""
    odd = environment(PYTHONIOENCODING=encoding)
    assert bench("list", "models", cwd=tmp_path, env=odd).returncode == 0
    process = subprocess.Popen(
        [*BENCH, "list", "models"], cwd=tmp_path, env=odd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    said = bench("show", "€", "--results", "runs", cwd=tmp_path, env=odd)
    assert (said.returncode, "Traceback" in said.stderr) == (2, False)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_not_taken_for_files(closed: str, tmp_path: Path) -> None:
    """The next file that is opened would have their number, and get what is printed there."""
    command = " ".join(f"'{word}'" for word in [*BENCH, *RUN, "--steps", "1", "--results", "runs"])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=tmp_path, env=environment())
    assert done.returncode == 0
    shown = bench("show", "pivot", "--recompute", "--results", "runs", cwd=tmp_path)
    assert "verified: " in shown.stdout


def test_a_full_disk_behind_stdout_is_an_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*BENCH, "list", "models"], cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 3
    assert b"No space left on device" in done.stderr


# ------------------------------------------------------------------------------- signals


def started(cwd: Path, **more: Any) -> subprocess.Popen[str]:
    """A long run of which two steps are done."""
    process = subprocess.Popen(
        [*BENCH, *LONG], cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True, **more
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step   2/"):
            return process
    raise AssertionError("the run ended before its second step")


@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background of a script"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_run_seal_it(how: signal.Signals, ignored: bool, tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = started(tmp_path, preexec_fn=ignore if ignored else None)
    process.send_signal(how)
    assert process.stderr is not None
    rest = process.stderr.read()
    assert process.wait(60) == 130, rest
    assert "Traceback" not in rest
    assert only_manifest(tmp_path / "runs")["status"] == "interrupted"
    shown = bench("show", "colocated", "--recompute", "--results", "runs", cwd=tmp_path)
    assert shown.stdout.startswith("interrupted after ")
    assert "verified: " in shown.stdout


def test_a_hangup_that_the_user_wants_ignored_is_ignored(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = started(tmp_path, preexec_fn=ignore)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130


def test_a_run_that_was_killed_is_not_running(tmp_path: Path) -> None:
    process = started(tmp_path)
    alive = bench("list", "runs", "--results", "runs", "--json", cwd=tmp_path)
    assert json.loads(alive.stdout)[0]["status"] == "running"
    process.kill()
    process.wait(60)
    listed = bench("list", "runs", "--results", "runs", cwd=tmp_path).stdout
    assert " died " in listed
    assert "(unverified)" in listed
    assert bench("list", "runs", "--status", "died", "--results", "runs", cwd=tmp_path).stdout == listed
    assert "died and has no summary" in bench("show", "colocated", "--results", "runs", cwd=tmp_path).stderr
    again = bench("show", "colocated", "--recompute", "--results", "runs", cwd=tmp_path).stdout
    assert again.startswith("died after ")
    assert "unverified: it died and is not sealed" in again


# ------------------------------------------------------------------------------- disks and paths


@pytest.mark.parametrize(
    ("arguments", "bytes_allowed"),
    [
        ([*RUN, "--steps", "3"], 40_000),  # the log does not fit
        ([*RUN, "--steps", "3"], 1_000),  # the manifest does not
        (TINY, 300_000),  # the weights do not
    ],
    ids=["log", "manifest", "weights"],
)
def test_a_file_that_does_not_fit_ends_in_one_line(
    arguments: list[str], bytes_allowed: int, tmp_path: Path
) -> None:
    """A limit on the size of files refuses what exceeds it, after taking a part: a disk that is full."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))

    done = bench(*arguments, "--quiet", "--results", "runs", cwd=tmp_path, preexec_fn=limited)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    assert "runs/" in done.stderr, "it says which file"
    assert not list(tmp_path.glob("runs/*/DONE"))
    statuses = {manifest["status"] for manifest in list_runs(tmp_path / "runs")}
    assert statuses <= {"failed"}, "whatever could be sealed is sealed as failed"


@pytest.mark.parametrize(
    "arguments",
    [[*RUN, "--steps", "2"], pytest.param(TINY, marks=pytest.mark.slow)],
    ids=["simulated", "real"],
)
def test_a_path_that_is_not_utf_8_is_a_path(arguments: list[str], tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")
    done = bench(*arguments, "--results", odd, cwd=tmp_path, errors="surrogateescape")
    assert done.returncode == 0, done.stderr
    assert only_manifest(Path(odd))["status"] == "complete"
    for command in (
        ["show", "pivot", "--recompute"],
        ["export", "pivot", "--format", "parquet", "--out", odd],
        ["figures", "timeline", "--out", odd],
        ["replay", "pivot"],
    ):
        done = bench(*command, "--results", odd, cwd=tmp_path, errors="surrogateescape")
        assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------- what code runs


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A working directory with folders that are called like ours."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise SystemExit('the wrong harness')\n")
    shutil.copytree(ROOT / "systems", tmp_path / "systems", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "systems" / "__init__.py").open("a") as file:
        file.write("open('seen', 'a').write('x')\n")
    return tmp_path


def test_cells_of_a_sweep_run_the_code_of_the_sweep(crowded: Path) -> None:
    settings = "\n".join(f'"{key}" = {value}' for key, value in (s.split("=") for s in SMALL))
    (crowded / "study.toml").write_text(
        'steps = 1\nseeds = [1]\n[[grid]]\nsystem = ["colocated", "pivot"]\nmodel = "dense-9b"\n'
        f"staleness = 0\ngpus = 8\n[grid.set]\n{settings}\n"
    )
    done = bench("sweep", "study.toml", "--results", "runs", "--quiet", cwd=crowded)
    assert (done.returncode, done.stdout) == (0, "2 cells: 2 run, 0 kept, 0 failed\n"), done.stderr
    assert not (crowded / "seen").exists()


def test_live_workers_run_the_code_of_the_control_process(crowded: Path) -> None:
    pytest.importorskip("torch")
    live = ("--backend", "live", "--gpus", "2")
    done = bench(*TINY, *live, "--results", "runs", "--quiet", cwd=crowded)
    assert done.returncode == 0, done.stderr
    assert not (crowded / "seen").exists()


# ------------------------------------------------------------------------------- what readers of results say


SPOILT: dict[str, tuple[str, list[str]]] = {
    "show": ("summary.json", ["show", "colocated"]),
    "show the log": ("events.jsonl", ["show", "colocated"]),
    "recompute": ("events.jsonl", ["show", "colocated", "--recompute"]),
    "replay": ("events.jsonl", ["replay", "colocated"]),
    "compare": ("summary.json", ["compare", "colocated", "pivot"]),
    "figures": ("summary.json", ["figures", "throughput"]),
    "timeline": ("events.jsonl", ["figures", "timeline"]),
    "export": ("events.jsonl", ["export", "colocated", "--format", "csv"]),
    "claims": ("summary.json", ["claims", "--claims", "claims.toml"]),
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two systems on six seeds, with a claim that they test."""
    cwd = tmp_path_factory.mktemp("study")
    settings = "\n".join(f'"{key}" = {value}' for key, value in (s.split("=") for s in SMALL))
    (cwd / "study.toml").write_text(
        f"steps = 1\nseeds = {list(range(6))}\n[[grid]]\n"
        'system = ["colocated", "pivot"]\nmodel = "dense-9b"\n'
        f"staleness = 0\ngpus = 8\n[grid.set]\n{settings}\n"
    )
    (cwd / "claims.toml").write_text(
        'frozen_in = "abc"\n[[claim]]\nid = "gain"\ntext = "a gain"\nsource = "abstract"\n'
        "low = 1.8\nhigh = 2\n"
        'suite = "study.toml"\n[claim.ratio]\nof = "pivot"\nto = "colocated"\n'
    )
    assert (
        bench("sweep", "study.toml", "--results", "runs", "--quiet", "--jobs", "2", cwd=cwd).returncode == 0
    )
    return cwd


@pytest.mark.parametrize("reader", SPOILT)
def test_no_reader_takes_a_file_that_is_not_what_was_sealed(reader: str, study: Path, tmp_path: Path) -> None:
    name, command = SPOILT[reader]
    cwd = tmp_path / "copy"
    shutil.copytree(study, cwd)
    if reader not in ("compare", "figures", "claims"):  # these are of one run of a seed
        for run in sorted((cwd / "runs").glob("*-s[1-5]")):
            shutil.rmtree(run)
    path = next((cwd / "runs").glob("*colocated*/manifest.json")).parent / name
    text = path.read_text()
    path.write_text(
        text.replace('"tokens":', '"tokens":1', 1) if name == "events.jsonl" else text.replace("1", "2", 1)
    )
    done = bench(*command, "--results", "runs", cwd=cwd)
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"{name} is not the file that was sealed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "makespan" not in done.stdout


def as_older(run: Path) -> None:
    """As a version without digests in its seals left it."""
    manifest = read_manifest(run / "manifest.json")
    assert manifest is not None
    manifest.pop("files")
    manifest["schema"] = 1
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_runs_that_nothing_vouches_for_are_marked(study: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "copy"
    shutil.copytree(study, cwd)
    for path in (cwd / "runs").glob("*colocated*"):
        as_older(path)

    def said(*command: str) -> str:
        done = bench(*command, "--results", "runs", cwd=cwd)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout + done.stderr

    one = next((cwd / "runs").glob("*colocated*")).name
    assert "files            unverified: it was sealed by a version" in said("show", one)
    assert "unverified" in json.loads(bench("show", one, "--json", "--results", "runs", cwd=cwd).stdout)
    assert said("list", "runs").count("(unverified)") == 6
    assert "note: 6 of 12 runs are unverified" in said("compare", "colocated", "pivot")
    assert "note        6 of 12 runs are unverified" in said("claims", "--claims", "claims.toml")
    assert "files            unverified" in said("replay", one)
    assert "unverified" in said("export", one, "--format", "csv")

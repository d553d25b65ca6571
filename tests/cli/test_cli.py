"""The command line as a user meets it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import SMALL

BENCH = [sys.executable, "-m", "harness.cli"]
SMALL_ARGS = [part for setting in SMALL for part in ("--set", setting)]
TINY = ["run", "--system", "pivot", "--model", "tiny-dense"]
RUN = ["run", "--system", "pivot", "--model", "dense-9b", "--steps", "2", *SMALL_ARGS]


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "NO_COLOR": "1", "WANDB_MODE": "disabled"}
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, cwd=cwd, env=env)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--system", "pivto", "--model", "dense-9b"], "did you mean 'pivot'?"),
        (["run", "--system", "pivot", "--model", "dense-9"], "did you mean 'dense-9b'?"),
        (["run", "--system", "pivot", "--model", "zzz"], "known: tiny-dense"),
        (["run", "--system", "pivot", "--model", "dense-9b", "--steps", "0"], "--steps 0"),
        (["run", "--system", "pivot", "--model", "dense-9b", "--steps", "many"], "'many'"),
        ([*RUN, "--steps", "99999999999999999999"], "1000000 are the most"),
        ([*RUN, "--staleness", "99999999999999999999"], "or above 1000000"),
        ([*RUN, "--gpus", "100000"], "at most 4096"),
        (["run", "--system", "pivot", "--model", "dense-9b", "--staleness", "-1"], "--staleness -1"),
        ([*RUN, "--set", "workload.promts=3"], "did you mean 'workload.prompts'?"),
        ([*RUN, "--set", "workload.prompts=three"], "workload.prompts=three"),
        ([*RUN, "--set", "workload.prompts=0"], "greater than or equal to 1"),
        ([*RUN, "--set", "workload.prompts"], "expected table.key=value"),
        ([*RUN, "--set", "workload.mini_batches=3"], "does not divide 8 prompts"),
        (["run", "--system", "disaggregated", "--model", "dense-9b", "--gpus", "2"], "needs at least 3"),
        ([*RUN, "--gpus", "0"], "dense-9b needs at least 1"),
        (["run", "--system", "pivot", "--model", "moe-30b", "--gpus", "30"], "nearest: 28 or 32"),
        ([*RUN, "--set", "cluster.train=64"], "the layout needs 72"),
        ([*RUN, "--backend", "cosim"], "no real weights"),
        ([*RUN, "--set", "learning.lr=1e-3"], "does not read learning.*"),
        ([*RUN, "--set", "cluster.hardware=a1000"], "did you mean 'a100'?"),
        ([*RUN, "--wandb", "ofline"], "did you mean 'offline'?"),
        ([*RUN, "--calibration", "x.toml"], "only --backend live reads it"),
        ([*TINY, "--set", "live.max_running=3"], "--backend cosim does not read live.*"),
        ([*TINY, "--backend", "live", "--calibration", "x.toml"], "x.toml: No such file"),
        ([*TINY, "--backend", "live", "--set", "cluster.token_scale=2"], "does not read cluster.token_scale"),
        (["calibrate", "--model", "tiny-dens"], "did you mean 'tiny-dense'?"),
        (["calibrate", "--workers", "0"], "--workers 0"),
        (["calibrate", "--data", "dir"], "bench fit --data dir"),
        (["fit"], "--data"),
        (["fit", "--data", "nowhere"], "nowhere"),
        (["replay", "nothing"], "no run matches 'nothing'"),
        (["run", "--system", "pivot", "--model", "dense-9b", "--set", "cluster.gpus=32"], "adds up to 16"),
        (["run", "--model", "dense-9b"], "--system"),
        (["rum"], "did you mean 'run'?"),
        (["list", "modles"], "did you mean 'models'?"),
        (["show", "nothing"], "no run matches 'nothing'"),
    ],
)
def test_bad_input_is_one_line_and_2_before_any_work(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = bench(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert says in result.stderr
    assert not list(tmp_path.iterdir()), "something was written before the input was refused"


def test_run_prints_json_that_show_recomputes(tmp_path: Path) -> None:
    result = bench(*RUN, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    for key in (
        "run", "path", "kind", "system", "model", "policy", "judge", "seed", "gpus", "staleness_bound",
        "makespan_s", "lower_bound_s", "weights_sha256", "events_sha256", "migrations", "shifts",
        "tokens_per_s", "gpu_time_share", "realised_staleness", "steps",
    ):  # fmt: skip
        assert key in summary
    assert set(summary["tokens_per_s"]) == {"policy", "judge", "total", "total_per_gpu"}
    assert set(summary["gpu_time_share"]) == {"rollout", "reward", "train", "shifting", "idle"}
    assert sum(summary["gpu_time_share"].values()) == pytest.approx(1.0)
    assert set(summary["realised_staleness"]) == {"max", "mean"}
    for key in ("step", "step_s", "reward", "true_accuracy", "response_tokens_mean", "judge_tokens_mean"):
        assert all(key in step for step in summary["steps"])
    assert summary["kind"] == "simulated"
    assert summary["weights_sha256"] is None
    assert len(summary["steps"]) == 2
    for again in ((), ("--recompute",)):
        shown = bench("show", summary["run"], "--json", *again, cwd=tmp_path)
        assert json.loads(shown.stdout) == summary


def test_progress_goes_to_stderr_and_run_and_path_come_first(tmp_path: Path) -> None:
    result = bench(*RUN, cwd=tmp_path)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("run ")
    assert lines[1].startswith("path results/runs/")
    assert "too large to be real" in result.stderr
    assert sum(line.startswith("step ") for line in lines) == 2
    assert "simulated" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    quiet = bench(*RUN, "--quiet", cwd=tmp_path)
    assert quiet.stderr == ""


def test_a_run_leaves_a_complete_directory(tmp_path: Path) -> None:
    summary = json.loads(bench(*RUN, "--json", "--quiet", cwd=tmp_path).stdout)
    path = tmp_path / summary["path"]
    assert {entry.name for entry in path.iterdir()} == {
        "manifest.json", "events.jsonl", "steps.parquet", "summary.json", "DONE",
    }  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["events_sha256"] == summary["events_sha256"]
    listed = bench("list", "runs", cwd=tmp_path).stdout
    assert summary["run"] in listed
    assert "complete" in listed


def test_the_alias_is_the_system(tmp_path: Path) -> None:
    summary = json.loads(
        bench("run", "--system", "shiftable", *RUN[3:], "--json", "--quiet", cwd=tmp_path).stdout
    )
    assert summary["system"] == "pivot"


def test_interrupted_runs_are_sealed_and_readable(tmp_path: Path) -> None:
    command = [*BENCH, "run", "--system", "disaggregated", "--model", "dense-9b", "--steps", "400"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_MODE": "disabled"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step   2/"):
            break
    time.sleep(0.2)  # somewhere inside a step
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130, "".join(seen) + rest
    assert "Traceback" not in rest
    run = next((tmp_path / "results/runs").iterdir())
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    assert not (run / "DONE").exists()
    shown = bench("show", run.name, "--recompute", "--json", cwd=tmp_path)
    assert len(json.loads(shown.stdout)["steps"]) >= 2


@pytest.mark.parametrize("what", ["systems", "models", "workloads"])
def test_lists(what: str, tmp_path: Path) -> None:
    result = bench("list", what, cwd=tmp_path)
    assert result.returncode == 0
    expected = {"systems": "colocated", "models": "moe-122b", "workloads": "128 prompts x 16 samples"}
    assert expected[what] in result.stdout

"""Real worker processes: the same weights as in co-simulation, killed or not, and clear ends when unfit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UnfitError
from harness.results.summary import Tally
from harness.runs.assemble import assemble
from harness.runs.runner import drive, header, run
from harness.runs.spec import RunSpec, resolve
from systems.loop.clock import run_live, run_virtual
from systems.policies import SYSTEMS
from tests.conftest import MemoryLog

pytest.importorskip("torch")

from systems.backends.live import cluster
from systems.backends.live.cluster import Limits, LocalCluster

QUICK = ("workload.prompts=4", "learning.max_new_tokens=96")


def spec_of(
    system: str, model: str, gpus: int, backend: str = "live", steps: int = 2,
    settings: tuple[str, ...] = QUICK,
) -> RunSpec:  # fmt: skip
    return resolve(
        system=system, model=model, backend=backend, steps=steps, seed=0, staleness=0, gpus=gpus,
        settings=settings,
    )  # fmt: skip


def final(spec: RunSpec, disturb: Callable[[LocalCluster], None] = lambda _: None) -> tuple[str, Tally]:
    """Weights digest and tally of a run; `disturb` is called with its workers when its time begins."""
    parts = assemble(spec)
    log = MemoryLog()
    log.emit(header(spec, parts))
    if spec.backend == "live":
        start = parts.backend.start

        def disturbed() -> None:
            start()
            disturb(parts.backend.cluster)  # type: ignore[attr-defined]

        parts.backend.start = disturbed  # type: ignore[method-assign]
        run_live(drive(spec, parts, log))
    else:
        run_virtual(drive(spec, parts, log))
    assert parts.learned is not None
    return parts.learned.weights_sha256(), log.tally()


def reference(model: str, steps: int = 2, settings: tuple[str, ...] = QUICK) -> str:
    return final(spec_of("colocated", model, 4, "cosim", steps, settings))[0]


# ------------------------------------------------------------------------------- the same weights


@pytest.mark.parametrize(
    ("system", "model", "gpus"),
    [
        ("pivot", "tiny-dense", 2),
        ("disaggregated", "tiny-moe", 4),
        ("rollout-reward", "tiny-dense", 3),
        ("trainer-pool", "tiny-dense", 4),
    ],
)
def test_live_weights_are_those_of_cosimulation(system: str, model: str, gpus: int) -> None:
    digest, tally = final(spec_of(system, model, gpus))
    assert digest == reference(model)
    assert tally.began.kind_of_numbers == "measured"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("gpus", [2, 4])
def test_live_weights_of_all_systems_at_the_full_recipe(model: str, gpus: int) -> None:
    expected = reference(model, steps=4, settings=())
    for system, policy in SYSTEMS.items():
        if gpus > 2 or policy.time_shares:
            assert final(spec_of(system, model, gpus, steps=4, settings=()))[0] == expected, system


# ------------------------------------------------------------------------------- killed workers


def kill_9(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the run was over before
        os.kill(pid, signal.SIGKILL)


def killed_somewhere(seed: int, model: str, quiet_s: float) -> tuple[str, Tally]:
    """A run in which one worker process gets SIGKILL at a random moment."""
    rng = random.Random(seed)
    moment_s = rng.uniform(0.0, quiet_s)

    def disturb(workers: LocalCluster) -> None:
        victim = rng.choice(list(workers.workers.values()))
        asyncio.get_running_loop().call_later(moment_s, kill_9, victim.pid)

    system, gpus = rng.choice(
        [
            ("pivot", 2),
            ("colocated", 2),
            ("disaggregated", 3),
            ("pivot", 3),
            ("rollout-reward", 3),
            ("trainer-pool", 4),
        ]
    )
    return final(spec_of(system, model, gpus), disturb)


def check_kills(seeds: range, model: str) -> None:
    expected = reference(model)
    digest, quiet = final(spec_of("pivot", model, 2))
    assert digest == expected
    quiet_s = quiet.steps[-1]["published_s"]
    losses = 0
    for seed in seeds:
        digest, tally = killed_somewhere(seed, model, quiet_s)
        assert digest == expected, f"seed {seed}"
        losses += tally.summary()["device_losses"]
    assert losses > 0, "every worker died after its last work: nothing was tested"


def test_a_killed_worker_changes_nothing() -> None:
    check_kills(range(3), "tiny-dense")


@pytest.mark.slow
def test_twenty_killed_workers_change_nothing() -> None:
    check_kills(range(100, 110), "tiny-dense")
    check_kills(range(110, 120), "tiny-moe")


def test_a_worker_that_is_killed_while_it_restarts_is_restarted_again() -> None:
    killed: list[int] = []

    def disturb(workers: LocalCluster) -> None:
        loop, first = asyncio.get_running_loop(), workers.workers[0]

        def once_more() -> None:
            if workers.workers[0] is first:
                loop.call_later(0.02, once_more)
            else:
                killed.append(workers.workers[0].pid)
                kill_9(workers.workers[0].pid)

        loop.call_soon(kill_9, first.pid)
        loop.call_soon(once_more)

    digest, _ = final(spec_of("pivot", "tiny-dense", 2), disturb)
    assert killed
    assert digest == reference("tiny-dense")


# ------------------------------------------------------------------------------- unfit workers


def unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits, python: str | None = None,
    disturb: Callable[[int], None] | None = None,
) -> str:  # fmt: skip
    """Run with such workers; returns the one line of the error. Nothing may be left behind."""
    pids: list[int] = []
    usual = cluster.Worker.__init__

    def noted(self: cluster.Worker, *args: Any) -> None:
        usual(self, *args)
        pids.append(self.pid)

    def made(devices: range) -> LocalCluster:
        return LocalCluster(devices, limits, **({"python": python} if python else {}))

    monkeypatch.setattr(cluster.Worker, "__init__", noted)
    monkeypatch.setattr("harness.runs.tiny_models.LocalCluster", made)

    def began(_: Any) -> None:
        if disturb is not None:
            threading.Thread(target=once_it_works, daemon=True).start()

    def once_it_works() -> None:
        events = None
        while events is None or b"sequence.finished" not in events.read_bytes():
            events = next(tmp_path.glob("*/events.jsonl"), None)
            time.sleep(0.05)
        assert disturb is not None
        disturb(pids[0])

    steps = 50 if disturb else 1
    with pytest.raises(UnfitError) as error:
        run(spec_of("pivot", "tiny-dense", 2, steps=steps), tmp_path, started=began)
    manifest = json.loads(next(tmp_path.glob("*/manifest.json")).read_text())
    assert manifest["status"] == "failed"
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    said = str(error.value)
    assert "\n" not in said
    assert manifest["reason"].removeprefix("ClusterUnfit: ") in said
    return said


def test_a_worker_that_ends_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not start: exit code 1" in unfit(tmp_path, monkeypatch, Limits(), python="/bin/false")


def test_a_worker_that_never_says_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    said = unfit(tmp_path, monkeypatch, Limits(start_s=0.5), python=str(silent))
    assert "did not start: nothing was heard from it" in said


def test_a_worker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = unfit(tmp_path, monkeypatch, Limits(beats=2), disturb=lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "hangs: gave no sign of life for 2 s" in said


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit to take memory away")
def test_a_worker_that_runs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))  # nothing new can be allocated

    assert "out of memory" in unfit(tmp_path, monkeypatch, Limits(), disturb=starve)

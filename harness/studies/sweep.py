"""Many runs: each in a process of its own, none lost and none twice.

| a cell is | if the results folder has                        | a sweep                                  |
|-----------|--------------------------------------------------|------------------------------------------|
| done      | a complete run of its id, by this code           | keeps it (and must be told so: `resume`) |
| failed    | none of these, but one that failed               | tries it again only with `retry`         |
| to do     | neither; what an ended sweep left is interrupted | runs it                                  |

Nothing but the runs themselves is kept: whoever kills a sweep at any moment can only lose the runs under way.
One sweep works in a results folder at a time; its lock is held by its cells as well.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness.errors import INTERRUPTED, UsageError
from harness.results.record import RunDirectory, list_runs, reserve
from harness.runs.code import code_sha256
from harness.runs.spec import RunSpec
from harness.studies.suite import Cell, Suite
from systems.machine import processes

LOCK = ".sweep.lock"
LOCK_PATIENCE_S = 10.0  # cells of a killed sweep need a moment to end
SEALING_S = 20.0  # an interrupted run seals its manifest
START_S = 0.9  # a process until its run begins
ALIKE = 4  # runs of up to so many times more or fewer sequences foretell each other's time
FAILED = ("failed", "invalid")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `complete`, or `failed` with the reason in one line."""

    cell: Cell
    status: str
    run: str
    why: str = ""


@dataclass
class Ledger:
    """What a results folder has of a suite: manifests by cell."""

    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    other_code: dict[str, dict[str, Any]] = field(default_factory=dict)  # complete, but another version's
    left: list[str] = field(default_factory=list)  # runs that are not sealed

    def to_do(self, cells: Sequence[Cell], retry: bool) -> list[Cell]:
        return [cell for cell in cells if cell.id not in self.done and (retry or cell.id not in self.failed)]


def ledger(suite: Suite, root: Path, any_code: bool = False) -> Ledger:
    """`any_code`: runs count whatever version of the code made them."""
    ids, found = {cell.id for cell in suite.cells}, Ledger()
    for manifest in list_runs(root):  # newest first
        cell, status = manifest.get("cell"), manifest["status"]
        if cell not in ids:
            continue
        same = any_code or manifest.get("code_sha256") == code_sha256()
        if status == "complete" and (root / manifest["run"] / "DONE").exists():
            (found.done if same else found.other_code).setdefault(cell, manifest)
        elif status in FAILED and same:
            found.failed.setdefault(cell, manifest)
        elif status == "running":
            found.left.append(manifest["run"])
    for cell in found.done:
        found.failed.pop(cell, None)
    for cell in (*found.done, *found.failed):
        found.other_code.pop(cell, None)
    return found


def interleaved(cells: Sequence[Cell], seed: str) -> list[Cell]:
    """Random order, with the systems of one comparison next to each other: a machine that drifts
    drifts for all of them."""
    rng = random.Random(seed)
    pairs: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        pairs[cell.pair].append(cell)
    groups = list(pairs.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    return [cell for group in groups for cell in group]


# ------------------------------------------------------------------------------------------- how long


class Forecast:
    """Seconds that a run takes here, from runs like it."""

    def __init__(self, root: Path) -> None:
        self._exactly: dict[str, list[float]] = defaultdict(list)
        self._alike: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        for manifest in list_runs(root):
            if manifest["status"] == "complete" and "wall_s" in manifest:
                raw, wall_s = manifest["spec"], manifest["wall_s"]
                self._exactly[manifest["spec_sha256"]].append(wall_s)
                alike = (raw["backend"], raw["system"], raw["group"]["name"])
                self._alike[alike].append((_sequences(raw["steps"], raw["group"]["workload"]), wall_s))

    def wall_s(self, spec: RunSpec) -> float | None:
        """None where nothing is known."""
        if known := self._exactly.get(spec.digest):
            return START_S + median(known)
        count = _sequences(spec.steps, spec.group.workload.model_dump())
        each = [
            wall_s / sequences
            for sequences, wall_s in self._alike[spec.backend, spec.system, spec.group.name]
            if 1 / ALIKE <= sequences / count <= ALIKE
        ]
        sequence_s = median(each) if each else spec.on.sequence_s
        return None if sequence_s is None else START_S + count * sequence_s


def _sequences(steps: int, workload: dict[str, Any]) -> int:
    count: int = steps * workload["prompts"] * workload["samples"] * (1 + workload["judge_calls"])
    return count


# ------------------------------------------------------------------------------------------- running


@contextmanager
def alone_in(root: Path) -> Iterator[int]:
    """The lock of a results folder. Raises `UsageError` if another sweep has it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"--results {root}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another sweep works in {root}; give --results another folder"
                    ) from None
                time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)


def seal_left(found: Ledger, root: Path) -> None:
    """Runs that an ended sweep left behind say so. Raises `UsageError` if one of the cells is being run."""
    left = [RunDirectory.open(root, str(root / run)) for run in found.left]
    for run in left:
        if run.is_alive():
            raise UsageError(f"{run.id} is a cell of this suite and is being run; wait for it")
    for run in left:
        run.seal("interrupted", {}, reason="its process ended before it was sealed")


def sweep(
    cells: Sequence[Cell], root: Path, lock: int, program: Sequence[str], *, jobs: int = 1,
    fail_fast: bool = False,
    wandb: str = "disabled", ended: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:  # fmt: skip
    """Run these in this order, `jobs` at a time. Ctrl-C interrupts runs under way, which seal themselves.

    `program` is the command line that makes one cell's run, without its request.
    """
    crew = _Crew(root, lock, program, wandb)
    waiting, outcomes = list(reversed(cells)), []
    running: set[Future[Outcome]] = set()
    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        running.add(pool.submit(crew.run, waiting.pop()))
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        outcome = future.result()
                        outcomes.append(outcome)
                        ended(outcome)
                        if fail_fast and outcome.status != "complete":
                            waiting.clear()
            except BaseException:
                crew.stop()
                raise
    finally:
        crew.close()
    return outcomes


def _unrecorded(root: Path, cell: Cell) -> RunDirectory:
    """The record of a cell whose process ended before it made one."""
    return RunDirectory.begin(reserve(root, cell.spec.name), cell.spec.manifest(), code_sha256())


class _Crew:
    """Starts cells and can stop them all."""

    def __init__(self, root: Path, lock: int, program: Sequence[str], wandb: str) -> None:
        self._root, self._lock, self._program, self._wandb = root, lock, tuple(program), wandb
        self._lifeline, self._held = os.pipe()  # closes when this process ends, however it ends
        self._children: list[subprocess.Popen[str]] = []
        self._guard = threading.Lock()
        self._stopped = False
        self._code = code_sha256()

    def run(self, cell: Cell) -> Outcome:
        """Whatever goes wrong with a cell is that cell's failure, and is on record."""
        before = {manifest["run"] for manifest in list_runs(self._root)}
        try:
            code, err = self._in_a_process(cell)
        except OSError as error:
            code, err = 1, str(error)
        mine = next(
            (m for m in list_runs(self._root) if m.get("cell") == cell.id and m["run"] not in before), None
        )
        if code == 0 and mine is not None and mine["status"] == "complete":
            if mine.get("code_sha256") == self._code:
                return Outcome(cell, "complete", mine["run"])
            return Outcome(cell, "failed", mine["run"], "the code was changed while the sweep ran")
        if self._stopped and mine is None:
            return Outcome(cell, "failed", "", "not started")
        try:
            return self._failed(cell, mine, code, err)
        except OSError as error:  # even the record of it does not fit on the disk
            return Outcome(cell, "failed", "", f"{error.filename or self._root}: {error.strerror or error}")

    def _in_a_process(self, cell: Cell) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        command = [
            *self._program, *cell.request, "--results", str(self._root), "--quiet",
            "--wandb", self._wandb,
        ]  # fmt: skip
        with self._guard:
            if self._stopped:
                return INTERRUPTED, "not started"
            child = subprocess.Popen(
                command, stdin=self._lifeline, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                errors="replace", start_new_session=True, pass_fds=(self._lock,), env=processes.environment(),
            )  # fmt: skip
            self._children.append(child)
        _, err = child.communicate()
        with self._guard:
            self._children.remove(child)
        return child.returncode, err

    def _failed(self, cell: Cell, mine: dict[str, Any] | None, code: int, err: str) -> Outcome:
        """The reason is the run's own where it has sealed itself; else what became of its process."""
        why = (err.strip().splitlines() or [f"ended with {code}"])[-1].removeprefix("bench: ")
        if code < 0:
            why = f"its process was killed by {signal.Signals(-code).name}"
        if mine is not None and mine["status"] != "running":
            return Outcome(cell, "failed", mine["run"], mine.get("reason", why))
        status = "interrupted" if self._stopped or code == INTERRUPTED else "failed"
        if mine is None:
            run = _unrecorded(self._root, cell)
        else:
            run = RunDirectory.open(self._root, str(self._root / mine["run"]))
        run.seal(status, {}, reason=why)
        return Outcome(cell, "failed", run.id, why)

    def stop(self) -> None:
        """Interrupt all; what does not seal itself in time is killed."""
        with self._guard:
            self._stopped = True
            children = list(self._children)
        for child in children:
            child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SEALING_S
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            time.sleep(0.05)
        for child in children:
            if child.poll() is None:
                child.kill()

    def close(self) -> None:
        os.close(self._held)
        os.close(self._lifeline)

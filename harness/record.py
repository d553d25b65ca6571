"""What a run leaves behind: a manifest sealed last, and an append-only log of events.

    results/runs/<UTC>-<system>-<model>-<hash8>-s<seed>/
        manifest.json   written first with status "running", sealed last
        events.jsonl    one event a line, flushed every RL step
        steps.parquet   one row an RL step, derived from the events
        summary.json    derived from the events
        DONE            exists once the run is complete

In virtual time `events.jsonl` holds no wall-clock time and no path: one seed, the same bytes. Where text and
gradients are real, that is a promise for one host and one torch build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from harness.errors import UsageError
from harness.spec import RunSpec

SCHEMA = 1
ASSEMBLING = ("build", "costs", "layout", "real", "runner", "spec", "tally")  # modules that decide numbers
STATUSES = ("running", "complete", "interrupted", "invalid", "failed")
RUNS = Path("results/runs")
NEEDED = {"run", "status", "kind", "spec", "spec_sha256"}  # of a manifest that can be read
LINES_TOGETHER = 4096  # events written at once, where no RL step ends before
Event = dict[str, Any]


class EventLog:
    """Appends events to `events.jsonl`, hashes them, and shows each to an observer."""

    def __init__(self, path: Path, observer: Callable[[Event], None]) -> None:
        self.path = path
        self._observe = observer
        self._file = path.open("wb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # held while the run lives, see `RunDirectory.is_alive`
        self._sha = hashlib.sha256()
        self._lines: list[bytes] = []  # not written yet

    def emit(self, kind: str, now_ns: int, **fields: Any) -> None:
        event = {"t": now_ns, "kind": kind, **fields}
        self._lines.append(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        self._observe(event)
        if kind == "version.published" or len(self._lines) >= LINES_TOGETHER:
            self._write()

    def _write(self) -> None:
        data, self._lines = b"".join(self._lines), []
        self._file.write(data)
        self._sha.update(data)

    @property
    def sha256(self) -> str:
        """Of what was written so far."""
        return self._sha.hexdigest()

    def close(self) -> None:
        if not self._file.closed:
            self._write()
            os.fsync(self._file.fileno())
            self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Events of a run; a last line that was cut off by a crash is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


@dataclass
class RunDirectory:
    """One run's directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, root: Path, spec: RunSpec) -> RunDirectory:
        now = datetime.now(UTC)
        stem = f"{now:%Y%m%dT%H%M%S}-{spec.system}-{spec.group.name}-{spec.digest[:8]}-s{spec.seed}"
        path = root / stem
        for attempt in range(2, 1000):
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = root / f"{stem}-{attempt}"
        manifest = {
            "schema": SCHEMA,
            "run": path.name,
            "status": "running",
            "kind": spec.kind,
            "spec": spec.to_json(),
            "spec_sha256": spec.digest,
            "cell": spec.id,
            "costs_sha256": spec.costs_sha256,
            "code_sha256": code_sha256(),
            "started": now.isoformat(timespec="seconds"),
            "machine": machine(),
        }
        run = cls(path, manifest)
        run._write()
        return run

    @classmethod
    def open(cls, root: Path, name: str) -> RunDirectory:
        """A run by id, by path, or by an unambiguous part of its id."""
        path = Path(name)
        if not (path / "manifest.json").is_file() and (root / name / "manifest.json").is_file():
            path = root / name
        elif not (path / "manifest.json").is_file():
            found = sorted(p.parent for p in root.glob("*/manifest.json") if name in p.parent.name)
            if len(found) != 1:
                what = "no run matches" if not found else f"{len(found)} runs match"
                raise UsageError(f"{what} '{name}' in {root}; see 'bench list runs'")
            path = found[0]
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except ValueError as error:
            raise UsageError(f"{path / 'manifest.json'}: not a manifest ({error})") from None
        return cls(path, manifest)

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    def is_alive(self) -> bool:
        """Does a process work on it?"""
        try:
            with self.events_path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def seal(self, status: str, **facts: Any) -> None:
        """The last thing that is written: how the run ended, and what that proves."""
        self.manifest |= {"status": status, **facts}
        self._write()
        if status == "complete":
            (self.path / "DONE").touch()

    def note(self, **facts: Any) -> None:
        """Something that became known after the run was sealed."""
        self.manifest |= facts
        self._write()

    def write_summary(self, summary: dict[str, Any]) -> None:
        replace_file(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(summary["steps"]), self.path / "steps.parquet")

    def _write(self) -> None:
        replace_file(self.path / "manifest.json", json.dumps(self.manifest, indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a whole file or leave the old one."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def machine() -> dict[str, Any]:
    """The host and versions that a wall-clock number or a bitwise claim depends on."""
    versions = {}
    for name in ("pivot-bench", "torch", "transformers", "ray", "vllm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


@cache
def code_sha256() -> str:
    """Of what decides a run beside its request: the code under test, what assembles it, and real weights."""
    root, sha = Path(__file__).parents[1], hashlib.sha256()
    paths = [*(root / "systems").rglob("*.py"), *(root / "workloads").rglob("*.py")]
    paths += [*(root / "workloads" / "hops" / "models").glob("*/*")]
    paths += [root / "harness" / f"{name}.py" for name in ASSEMBLING]
    for path in sorted(paths):
        sha.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return sha.hexdigest()


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Manifests of all runs, newest first; unreadable ones are left out."""
    manifests = []
    for path in sorted(root.glob("*/manifest.json"), reverse=True):
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and manifest.keys() >= NEEDED:
            manifests.append(manifest)
    return manifests

"""What a run leaves behind: a manifest sealed last, and an append-only log of events.

    results/runs/<UTC>-<system>-<model>-<hash8>-s<seed>/
        manifest.json   written first with status "running", sealed last with the digests of the other files
        events.jsonl    one event a line, flushed every RL step
        steps.parquet   one row an RL step, derived from the events
        summary.json    derived from the events
        DONE            exists once the run is complete

Invariants
* A file counts only as it was sealed: whoever reads one checks its digest first (`RunDirectory.check_file`).
* A run is sealed as complete only if the log on the disk is the one that was hashed while it was written.
* The log is locked while its run lives, so a run that was killed before it could seal is known to be over.

In virtual time `events.jsonl` holds no wall-clock time and no path: one seed, the same bytes. Where text and
gradients are real, that is a promise for one host and one torch build.
"""

from __future__ import annotations

import fcntl
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.errors import InvalidRun, UsageError
from harness.results.log import EVENT_SCHEMA, EVENTS
from systems.machine.files import file_sha256, replace_file

MANIFEST_SCHEMA = 2  # 1 had no digests of steps and summary
RUNNING, DIED = "running", "died"  # the second is never written: nobody is left to do it
STATUSES = (RUNNING, "complete", "interrupted", "invalid", "failed", DIED)
RUNS = Path("results/runs")
NEEDED = {"run", "status", "kind", "spec", "spec_sha256"}  # of a manifest that can be read
SUMMARY, STEPS = "summary.json", "steps.parquet"
SEALED = (EVENTS, STEPS, SUMMARY)  # files whose digests are in the seal
SHOWN_DIGITS = 12  # of a digest, in a message


def reserve(root: Path, name: str) -> Path:
    """A new directory for a run that is called so, with the time before its name."""
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}"
    for attempt in range(1, 1000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise UsageError(f"{root / stem}: a thousand runs of this second are there already")


@dataclass
class RunDirectory:
    """One run's directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def id(self) -> str:
        return self.path.name

    @classmethod
    def begin(cls, path: Path, request: Mapping[str, Any], code: str) -> RunDirectory:
        """The manifest of a run that starts now in `path`. Open its log first: that tells that it lives.

        `request` are the entries that say what was asked for, `code` the digest of what runs.
        """
        manifest = {
            "schema": MANIFEST_SCHEMA,
            "event_schema": EVENT_SCHEMA,
            "run": path.name,
            "status": RUNNING,
            **request,
            "code_sha256": code,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
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
        manifest = read_manifest(path / "manifest.json")
        if manifest is None:
            raise UsageError(f"{path / 'manifest.json'}: not a manifest")
        return cls(path, manifest)

    @property
    def events_path(self) -> Path:
        return self.path / EVENTS

    @property
    def status(self) -> str:
        """How it ended, or `running`, or `died`: its process ended before it could seal it."""
        return status_of(self.manifest, self.path)

    def is_alive(self) -> bool:
        """Does a process work on it?"""
        return _is_locked(self.events_path)

    # ------------------------------------------------------------------------------- sealing

    def seal(self, status: str, **facts: Any) -> None:
        """The last thing that is written: how the run ended, what that proves, and its files' digests."""
        digests = {name: file_sha256(self.path / name) for name in SEALED if (self.path / name).is_file()}
        self.manifest |= {"status": status, **facts, "files": digests}
        self._write()
        if status == "complete":
            (self.path / "DONE").touch()

    def note(self, **facts: Any) -> None:
        """Something that became known after the run was sealed."""
        self.manifest |= facts
        self._write()

    def write_summary(self, summary: dict[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        replace_file(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
        table = pa.BufferOutputStream()  # pyarrow opens no path whose name is not UTF-8
        pq.write_table(pa.Table.from_pylist(summary["steps"]), table)
        replace_file(self.path / STEPS, table.getvalue().to_pybytes())

    def _write(self) -> None:
        replace_file(self.path / "manifest.json", json.dumps(self.manifest, indent=1) + "\n")

    # ------------------------------------------------------------------------------- trusting

    def check_file(self, name: str) -> bool:
        """Is this file the one that was sealed? False where the seal says nothing of it.

        Raises `InvalidRun` if it is another one, or is gone.
        """
        sealed = self._sealed().get(name)
        if sealed is None:
            return False
        path = self.path / name
        if not path.is_file():
            raise InvalidRun(f"{self.id}: {path} is gone, though the run was sealed with it")
        found = file_sha256(path)
        if found != sealed:
            raise InvalidRun(
                f"{self.id}: {path} is not the file that was sealed (sha256 {found[:SHOWN_DIGITS]}..., "
                f"sealed {sealed[:SHOWN_DIGITS]}...): its numbers count for nothing"
            )
        return True

    def check(self) -> None:
        """Check all files of the run that its seal knows."""
        for name in SEALED:
            self.check_file(name)

    @property
    def unverified(self) -> str | None:
        """Why this run's files cannot all be checked against a seal, in words; None if they can."""
        if self.manifest["status"] == RUNNING:
            return f"unverified: it {'is running' if self.is_alive() else 'died'} and is not sealed"
        if "files" not in self.manifest:
            return "unverified: it was sealed by a version that kept no digests of steps and summary"
        return None

    def _sealed(self) -> dict[str, str]:
        """Digests by file name. Schema 1 kept that of the log alone."""
        if self.manifest["status"] == RUNNING:
            return {}
        log = self.manifest.get("events_sha256")
        return {**({EVENTS: log} if log else {}), **(self.manifest.get("files") or {})}


def _is_locked(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def status_of(manifest: dict[str, Any], path: Path) -> str:
    """The status in a manifest, corrected where nobody was left to write it. `path` is the run's."""
    status: str = manifest["status"]
    return DIED if status == RUNNING and not _is_locked(path / EVENTS) else status


# ------------------------------------------------------------------------------- where a run was made


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


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ------------------------------------------------------------------------------- finding runs


def read_manifest(path: Path) -> dict[str, Any] | None:
    """A manifest; None where there is nothing that can be read as one."""
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.keys() >= NEEDED else None


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Manifests of all runs, newest first; unreadable ones are left out."""
    read = map(read_manifest, sorted(root.glob("*/manifest.json"), reverse=True))
    return [manifest for manifest in read if manifest is not None]

"""What a run leaves behind: a manifest sealed last, and an append-only log of events.

    results/runs/<UTC>-<system>-<model>-<hash8>-s<seed>/
        manifest.json   written first with status "running", sealed last with the digests of the other files
        events.jsonl    one event a line, flushed every RL step
        steps.parquet   one row an RL step, derived from the events
        summary.json    derived from the events
        DONE            exists once the run is complete

Invariants
* A file counts only as it was sealed: whoever reads a run checks its digests first (`RunDirectory.check`).
* A run is sealed as complete only if the log on the disk is the one that was hashed while it was written.
* The log is locked while its run lives, so a run that was killed before it could seal is known to be over.

In virtual time `events.jsonl` holds no wall-clock time and no path: one seed, the same bytes. Where text and
gradients are real, that is a promise for one host and one torch build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.errors import InvalidRun, UsageError
from harness.results.log import EVENTS
from systems.events import EVENT_SCHEMA
from systems.machine.files import file_sha256, replace_file

MANIFEST_SCHEMA = 2  # 1 had no digests of steps and summary
RUNNING, COMPLETE, DIED = "running", "complete", "died"  # the last is never written: nobody is left to do it
STATUSES = (RUNNING, COMPLETE, "interrupted", "invalid", "failed", DIED)
RUNS = Path("results/runs")
NEEDED = {"run", "status", "kind", "spec", "spec_sha256"}  # of a manifest that can be read
ASKED = {"system", "backend", "steps", "seed", "staleness", "group"}  # of its spec
MANIFEST, DONE = "manifest.json", "DONE"
SUMMARY, STEPS = "summary.json", "steps.parquet"
SEALED = (EVENTS, STEPS, SUMMARY)  # files whose digests are in the seal
# Environment variables that choose other instructions for the same arithmetic: real weights hang on them.
ARITHMETIC = (
    "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
)  # fmt: skip
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
        return self.path.absolute().name

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

    @property
    def said(self) -> str:
        """Its status as the end of a sentence that begins with the run."""
        return "died" if self.status == DIED else f"is {self.status}"

    def is_alive(self) -> bool:
        """Does a process work on it?"""
        return _is_locked(self.events_path)

    # ------------------------------------------------------------------------------- sealing

    def seal(self, status: str, files: Mapping[str, str], **facts: Any) -> None:
        """The last thing that is written: how the run ended, what that proves, and its files' digests.

        `files` are digests of what the run itself has written, by name. Whoever seals a run that was left by
        another process gives none: nobody can vouch for what lies there.
        """
        self.manifest |= {"status": status, **facts, "files": dict(files)}
        self._write()
        if status == COMPLETE:
            (self.path / DONE).touch()

    def note(self, **facts: Any) -> None:
        """Something that became known after the run was sealed."""
        self.manifest |= facts
        self._write()

    def write_summary(self, summary: dict[str, Any]) -> dict[str, str]:
        """Write summary and steps; digests of what was written, by name."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.BufferOutputStream()  # pyarrow opens no path whose name is not UTF-8
        pq.write_table(pa.Table.from_pylist(summary["steps"]), table)
        contents = {
            SUMMARY: (json.dumps(summary, indent=1) + "\n").encode(), STEPS: table.getvalue().to_pybytes(),
        }  # fmt: skip
        for name, content in contents.items():
            replace_file(self.path / name, content)
        return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def _write(self) -> None:
        replace_file(self.path / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    # ------------------------------------------------------------------------------- trusting

    def check(self) -> None:
        """Is everything that is here what was sealed?

        Raises `InvalidRun` naming a file that is another one, or is gone, and for a manifest whose request is
        not the one that its digests are of. What the seal says nothing of is `unverified`.
        """
        self._check_request()
        for name, sealed in self._sealed().items():
            path = self.path / name
            if not path.is_file():
                raise InvalidRun(f"{self.id}: {path} is gone, though the run was sealed with it")
            found = file_sha256(path)
            if found != sealed:
                raise InvalidRun(
                    f"{self.id}: {path} is not the file that was sealed (sha256 {found[:SHOWN_DIGITS]}..., "
                    f"sealed {sealed[:SHOWN_DIGITS]}...): its numbers count for nothing"
                )

    def _check_request(self) -> None:
        """A manifest says what was asked for, and the digests of that: none of them alone can be changed."""
        manifest = self.manifest
        asked = (manifest["spec"], manifest.get("costs_sha256"))
        for key, digest in (("spec_sha256", replicates_sha256(asked[0])), ("cell", cell_sha256(*asked))):
            if manifest.get(key, digest) != digest:
                raise InvalidRun(
                    f"{self.id}: {self.path / MANIFEST} was changed: what it asks for does not have its {key}"
                )

    @property
    def unverified(self) -> str | None:
        """Why this run's files cannot all be checked against a seal, in words; None if they can."""
        if self.manifest["status"] == RUNNING:
            return f"it {'is running' if self.is_alive() else 'died'} and is not sealed"
        sealed = self.manifest.get("files")
        if not isinstance(sealed, dict):
            return "it was sealed by a version that kept no digests of steps and summary"
        if not sealed:
            return "it ended without a seal of its own"
        there = [name for name in SEALED if (self.path / name).is_file()]
        if foreign := [name for name in there if not isinstance(sealed.get(name), str)]:
            return f"its seal says nothing of {' and '.join(foreign)}"
        return None

    @property
    def sealed(self) -> list[str]:
        """Files that the seal vouches for."""
        return list(self._sealed())

    def _sealed(self) -> dict[str, str]:
        """Digests by file name. Schema 1 kept that of the log alone."""
        if self.manifest["status"] == RUNNING:
            return {}
        sealed, log = self.manifest.get("files"), self.manifest.get("events_sha256")
        if not isinstance(sealed, dict):
            return {EVENTS: log} if isinstance(log, str) else {}
        return {name: sealed[name] for name in SEALED if isinstance(sealed.get(name), str)}


def _is_locked(log: Path) -> bool:
    """Does a process write it? Looking takes a shared lock, so that two who look do not see each other."""
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is not there, or cannot be asked
        return False
    return False


def status_of(manifest: Mapping[str, Any], path: Path) -> str:
    """The status in a manifest, corrected where nobody was left to write it. `path` is the run's."""
    status: str = manifest["status"]
    unfinished = status == RUNNING and not _is_locked(path / EVENTS)
    unmarked = status == COMPLETE and not (path / DONE).exists()
    return DIED if unfinished or unmarked else status


def replicates_sha256(spec: Mapping[str, Any]) -> str:
    """The digest of everything that was asked for but the seed: runs that share it are replicates."""
    return _sha256({key: value for key, value in spec.items() if key != "seed"})


def cell_sha256(spec: Mapping[str, Any], costs_sha256: str | None) -> str:
    """The digest of all that decides a run beside the code: equal cells make equal runs."""
    return _sha256([spec, costs_sha256])


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------- where a run was made


def machine() -> dict[str, Any]:
    """The host and versions that a wall-clock number or a bitwise claim depends on."""
    versions = {}
    arithmetic = {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
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
        "arithmetic": arithmetic,
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
    """A manifest; None where there is nothing that can be read as one. A run is called as its folder is."""
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or not manifest.keys() >= NEEDED:
        return None
    spec = manifest["spec"]
    if not isinstance(spec, dict) or not spec.keys() >= ASKED or manifest["status"] not in STATUSES:
        return None
    group = spec["group"]
    if not isinstance(group, dict) or not group.keys() >= {"name", "cluster", "workload"}:
        return None
    return {**manifest, "run": path.parent.absolute().name}


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Manifests of all runs, newest first; unreadable ones are left out (see `unreadable`)."""
    read = map(read_manifest, sorted(root.glob(f"*/{MANIFEST}"), reverse=True))
    return [manifest for manifest in read if manifest is not None]


def unreadable(root: Path) -> list[str]:
    """What a reader must be told of folders that look like runs and have no manifest that can be read."""
    folders = sorted({path.parent for name in (MANIFEST, EVENTS) for path in root.glob(f"*/{name}")})
    found = [folder for folder in folders if read_manifest(folder / MANIFEST) is None]
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"left out, because its manifest cannot be read: {found[0]}{more}"]

"""Finished runs as tables. The only reader of results.

Every file is checked against the run's seal before it is used: one that is not what was sealed is refused
(exit 5). Summaries of older schema versions are migrated as they are read; nothing on disk is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.errors import BenchError, InvalidRun, UsageError, unknown
from harness.results.log import reading
from harness.results.record import COMPLETE, SUMMARY, RunDirectory, list_runs
from harness.results.summary import CUT_OFF, SUMMARY_SCHEMA, Share, Tally
from systems.events import Event, ShiftBegan, ShiftEnded, ShiftPhase, devices_of
from systems.types import Kind, Placement

USED = {  # of a summary, by those who compare, draw and export
    "run", "kind", "system", "model", "seed", "gpus", "steps", "staleness_bound", "realised_staleness",
    "makespan_s", "tokens_per_s", "gpu_time_share", "cut_off", "warnings",
}  # fmt: skip


class Replicate(NamedTuple):
    """A seed, and one of `machines` plausible machines; 0 of 0 is the nominal one."""

    seed: int
    machine: int
    machines: int

    def __str__(self) -> str:
        return f"{self.seed}" + (f" on machine {self.machine}" if self.machine else "")


@dataclass(frozen=True)
class Recorded:
    """A complete run: its directory, manifest and summary, which is read when it is asked for."""

    directory: RunDirectory
    given: dict[str, Any] | None = None  # a summary in place of the file's
    variant: str | None = None  # of the suite that it is seen as a cell of

    def checked(self) -> Recorded:
        """This run, whose files are what was sealed. Raises `InvalidRun`."""
        self.directory.check()
        return self

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.directory) if self.given is None else self.given

    @property
    def id(self) -> str:
        return self.directory.id

    @property
    def kind(self) -> Kind:
        return Kind(self.directory.manifest["kind"])

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved request."""
        spec: dict[str, Any] = self.directory.manifest["spec"]
        return spec

    @property
    def seed(self) -> int:
        seed: int = self.spec["seed"]
        return seed

    @property
    def replicate(self) -> Replicate:
        """What two runs share that are a pair."""
        on = self.spec.get("machine") or {"number": 0, "of": 0}
        return Replicate(self.seed, on["number"], on["of"])

    @property
    def staleness(self) -> float:
        """Mean over the trained samples, as it came out."""
        mean: float = self.summary["realised_staleness"]["mean"]
        return mean

    @property
    def workload(self) -> dict[str, Any]:
        """All of the request that two runs must share to be compared: not the system, seed or bound."""
        spec = self.directory.manifest["spec"]
        shared = {key: spec.get(key) for key in ("backend", "steps", "group", "trace", "calibration")}
        shared["costs"] = self.directory.manifest.get("costs_sha256")
        if self.kind is Kind.MEASURED:
            shared["machine"] = {"arithmetic": {}, **self.directory.manifest["machine"]}
        return shared

    @contextmanager
    def events(self) -> Iterator[Iterator[Event]]:
        """Its log, for the block that uses it.

        Raises `InvalidRun` if it is not what was sealed, or has a hole.
        """
        self.checked()
        with reading(self.directory.events_path) as events:
            yield events


def read_summary(directory: RunDirectory) -> dict[str, Any]:
    """A run's summary in the present schema.

    Raises `BenchError` if it has none or a later one, `InvalidRun` if it is not the one that was sealed.
    """
    path = directory.path / SUMMARY
    directory.check()
    if not path.is_file():
        raise BenchError(
            f"{directory.id} {directory.said} and has no summary; "
            f"'bench show {directory.id} --recompute' derives one from what was logged"
        )
    try:
        summary = json.loads(path.read_bytes())
    except ValueError as error:
        hint = "'bench show --recompute' derives it again"
        raise BenchError(f"{path}: not a summary ({error}); {hint}") from None
    found = migrated(summary, directory.id)
    spec = directory.manifest["spec"]
    asked = {
        "system": spec["system"], "seed": spec["seed"], "staleness_bound": spec["staleness"],
        "model": spec["group"]["name"], "gpus": spec["group"]["cluster"]["gpus"],
    }  # fmt: skip
    for key, value in asked.items():
        if found[key] != value:
            raise InvalidRun(
                f"{directory.id}: its summary is of {key} {found[key]}, its manifest asks for {value}: its "
                "numbers count for nothing"
            )
    return found


def reservations(runs: Sequence[Recorded]) -> list[str]:
    """What a reader of numbers from these runs must know of them, a line each: files that nothing vouches
    for, texts that were cut off, code and arithmetic that differ."""
    lines = []
    if found := [run for run in runs if run.directory.unverified]:
        why = found[0].directory.unverified
        lines.append(f"{len(found)} of {len(runs)} runs are unverified; the first: {why}")
    if warned := [run for run in runs if run.summary["warnings"]]:
        lines.append(f"{len(warned)} of {len(runs)} runs warn, the first: {warned[0].summary['warnings'][0]}")
    manifests = [run.directory.manifest for run in runs]
    if (versions := len({manifest.get("code_sha256") for manifest in manifests})) > 1:
        lines.append(f"runs of {versions} versions of the code")
    if any("costs_sha256" not in manifest for manifest in manifests):
        lines.append("some runs are older than the record of the simulator's coefficients, which may differ")
    settings = {
        json.dumps(m["machine"].get("arithmetic", {}), sort_keys=True) for m in manifests if "machine" in m
    }
    if len(settings) > 1 and any(run.summary["weights_sha256"] for run in runs):
        lines.append("runs whose environment chose other instructions for the same arithmetic")
    return lines


def migrated(summary: Any, run: str) -> dict[str, Any]:
    """One version after the other. Raises `BenchError` if it is no summary, or of an unknown version."""
    if not isinstance(summary, dict):
        raise BenchError(f"{run}: its summary is not an object")
    version = summary.get("summary_schema", 0)
    if version not in (*MIGRATIONS, SUMMARY_SCHEMA):
        raise BenchError(
            f"{run}: its summary has schema {version}; this version reads {min(MIGRATIONS)} to "
            f"{SUMMARY_SCHEMA}"
        )
    found: dict[str, Any] = summary
    try:
        while version != SUMMARY_SCHEMA:
            found = MIGRATIONS[version](found)
            version = found["summary_schema"]
    except (LookupError, TypeError, AttributeError) as error:
        raise BenchError(f"{run}: its summary is not one of schema {version} ({error})") from None
    if missing := sorted(USED - found.keys()):
        raise BenchError(f"{run}: its summary has no {', '.join(missing)}; --recompute derives it again")
    return found


def _without_provisional(summary: dict[str, Any]) -> dict[str, Any]:
    """1 said that training and shift costs were assumed. What it was computed with is in the manifest."""
    kept = {key: value for key, value in summary.items() if key != "provisional"}
    return kept | {"summary_schema": 2}


def _without_counts_of_what_was_cut_off(summary: dict[str, Any]) -> dict[str, Any]:
    """2 did not count what was truncated or unparsable: that is unknown, not zero."""
    unknown_counts = dict.fromkeys(("responses", "judgements", *CUT_OFF))
    steps = [{**unknown_counts, **step} for step in summary["steps"]]
    return {"cut_off": unknown_counts, "warnings": [], **summary, "summary_schema": 3, "steps": steps}


def _without_loss(summary: dict[str, Any]) -> dict[str, Any]:
    """3 did not say where time went beyond the bound; its log does."""
    return {**summary, "summary_schema": 4}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: _without_provisional,
    2: _without_counts_of_what_was_cut_off,
    3: _without_loss,
}


def open_runs(root: Path, names: Sequence[str] = (), kind: str | None = None) -> list[Recorded]:
    """The named runs, or all complete ones below `root`, oldest first; of one kind if `kind` is given.

    Raises `UsageError` if there are none, or a named one is not complete.
    """
    if kind is not None and kind not in [known.value for known in Kind]:
        raise unknown("kind", kind, [known.value for known in Kind])
    if names:
        directories = [RunDirectory.open(root, name) for name in names]
    else:
        found = (RunDirectory(root / manifest["run"], manifest) for manifest in reversed(list_runs(root)))
        directories = [directory for directory in found if directory.status == COMPLETE]
    for directory in directories:
        if directory.status != COMPLETE:
            raise UsageError(f"{directory.id} {directory.said}, not complete")
    of_kind = [run for run in map(Recorded, directories) if kind is None or run.kind == kind]
    if not of_kind:
        raise UsageError(f"no complete{f' {kind}' if kind else ''} run in {root}; make one: bench run ...")
    return of_kind


# ------------------------------------------------------------------------------------------- tables


def throughput_table(runs: Sequence[Recorded]) -> pd.DataFrame:
    """One row a run: generated tokens a second over all its devices."""
    rows = [
        {
            "run": run.id,
            **{key: run.summary[key] for key in ("kind", "model", "system", "seed", "gpus")},
            "steps": len(run.summary["steps"]),
            "staleness_bound": run.summary["staleness_bound"],
            "staleness_mean": run.summary["realised_staleness"]["mean"],
            "makespan_s": run.summary["makespan_s"],
            **{
                f"{key}_tokens_per_s": run.summary["tokens_per_s"][key]
                for key in ("policy", "judge", "total")
            },
        }
        for run in runs
    ]
    return pd.DataFrame(rows)


def intervals_table(run: Recorded) -> pd.DataFrame:
    """Device time by interval: device, start and end in seconds, share; what is missing was idle."""
    rows: list[tuple[int, float, float, str]] = []

    def spent(devices: tuple[int, ...], share: Share, start: int, end: int) -> None:
        rows.extend((device, start / 1e9, end / 1e9, share.value) for device in devices)

    tally = Tally(spent=spent)
    with run.events() as events:
        for event in events:
            tally.add(event)
    table = pd.DataFrame(rows, columns=["device", "start_s", "end_s", "share"])
    return table.sort_values(["device", "start_s"], ignore_index=True)


def phases_table(run: Recorded) -> pd.DataFrame:
    """One row a phase of a shift that took devices from a role and ended well.

    Columns: shift, source and target roles, devices, phase, seconds, bytes.
    """
    rows: list[dict[str, Any]] = []
    under_way: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}  # facts, and phases so far
    since: dict[int, int] = {}
    with run.events() as events:
        for event in events:
            if isinstance(event, ShiftBegan) and event.sources:
                roles = {"source": _roles(event.sources), "target": _roles(event.targets)}
                under_way[event.shift] = (
                    {"shift": event.shift, **roles, "devices": len(devices_of(event))},
                    [],
                )
                since[event.shift] = event.t_ns
            elif isinstance(event, ShiftPhase) and event.shift in under_way:
                facts, phases = under_way[event.shift]
                seconds = (event.t_ns - since[event.shift]) / 1e9
                phases.append(
                    {**facts, "phase": event.phase.value, "seconds": seconds, "bytes": event.bytes_moved}
                )
                since[event.shift] = event.t_ns
            elif isinstance(event, ShiftEnded) and event.shift in under_way:
                _, phases = under_way.pop(event.shift)
                rows.extend(phases if event.ok else [])
    return pd.DataFrame(rows, columns=["shift", "source", "target", "devices", "phase", "seconds", "bytes"])


def _roles(placements: Sequence[Placement]) -> str:
    return "+".join(sorted({placement.role for placement in placements})) or "none"

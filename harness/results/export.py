"""A run in other tools' formats: tables as CSV or Parquet, and a trace for Perfetto's timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import unknown
from harness.results.tables import Recorded, intervals_table, phases_table
from systems.events import SequenceFinished, SequencesDispatched, SequencesRequeued, VersionPublished, encode
from systems.machine.files import replace_file
from systems.types import SERVING

FORMATS = ("parquet", "csv", "perfetto")
US = 1e6  # a trace's times are microseconds
COUNTS = 2000  # points of a counter's curve, at most


def export(run: Recorded, form: str, out: Path) -> list[Path]:
    """Write into `out`; what was written."""
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    out.mkdir(parents=True, exist_ok=True)
    if form == "perfetto":
        path = out / f"{run.id}.perfetto.json"
        replace_file(path, json.dumps(perfetto(run)))
        return [path]
    written = []
    for name, table in tables(run).items():
        path = out / f"{run.id}.{name}.{form}"
        content = table.to_csv(index=False) if form == "csv" else table.to_parquet(index=False)
        replace_file(path, content)
        written.append(path)
    return written


def tables(run: Recorded) -> dict[str, pd.DataFrame]:
    """`steps`, device `intervals`, shift `phases`, and all `events` (fields as JSON)."""
    makers: dict[str, Callable[[Recorded], pd.DataFrame]] = {
        "steps": lambda run: pd.DataFrame(run.summary["steps"]),
        "intervals": intervals_table,
        "phases": phases_table,
        "events": _events,
    }
    return {name: make(run) for name, make in makers.items()}


def _events(run: Recorded) -> pd.DataFrame:
    with run.events() as events:
        rows = [
            (
                event.t_ns,
                event.kind,
                json.dumps({k: v for k, v in encode(event).items() if k not in ("t", "kind")}),
            )
            for event in events
        ]
    return pd.DataFrame(rows, columns=["t_ns", "kind", "fields"])


def perfetto(run: Recorded) -> dict[str, Any]:
    """The Trace Event format: a process a node, a thread a device, counters of running sequences."""
    per_node: int = run.spec["group"]["cluster"]["gpus_per_node"]
    gpus: int = run.summary["gpus"]
    events: list[dict[str, Any]] = []
    for node in range(-(-gpus // per_node)):
        events.append(_named("process_name", node, 0, f"node {node}"))
    for device in range(gpus):
        events.append(_named("thread_name", device // per_node, device, f"device {device}"))
    for device, start, end, share in intervals_table(run).itertuples(index=False):
        events.append(
            {
                "ph": "X", "name": share, "cat": "device", "pid": int(device) // per_node, "tid": int(device),
                "ts": start * US, "dur": (end - start) * US,
            }
        )  # fmt: skip
    events += _counters(run)
    about = {key: run.summary[key] for key in ("run", "kind", "system", "model", "seed", "makespan_s")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _change(event: SequencesDispatched | SequenceFinished | SequencesRequeued) -> int:
    """How many more sequences run after it."""
    if isinstance(event, SequencesDispatched):
        return len(event.sequences)
    return -len(event.sequences) if isinstance(event, SequencesRequeued) else -1


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _counters(run: Recorded) -> list[dict[str, Any]]:
    """Sequences that run, by role, at most so often; and the moment of each publish."""
    apart = run.summary["makespan_s"] / COUNTS * 1e9
    running, said, found = dict.fromkeys(map(str, SERVING), 0), -apart, []
    counter = {"ph": "C", "name": "running sequences", "pid": 0}
    with run.events() as events:
        for event in events:
            if isinstance(event, SequencesDispatched | SequenceFinished | SequencesRequeued):
                running[event.role] += _change(event)
                if event.t_ns - said >= apart:
                    said = event.t_ns
                    found.append({**counter, "ts": said / 1e3, "args": {**running}})
            elif isinstance(event, VersionPublished):
                name = f"version {event.version} published"
                found.append({"ph": "i", "name": name, "pid": 0, "tid": 0, "ts": event.t_ns / 1e3, "s": "g"})
    return found

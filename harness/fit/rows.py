"""A user's own measurements against the simulator: a CSV file, a row a measurement (`points.py`)."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.errors import UsageError
from harness.fit.points import metrics, predict


@dataclass(frozen=True)
class Group:
    """Signed relative errors of rows of one kind, model, device and metric. `inside`: in their 80 % bands."""

    name: str
    rows: int
    median: float
    mape: float
    p90: float
    inside: float


@dataclass(frozen=True)
class Compared:
    """All groups, and every row: measured, predicted, low, high."""

    groups: tuple[Group, ...]
    points: pd.DataFrame

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [asdict(group) for group in self.groups],
            "rows": self.points.to_dict("records"),
        }


def compare_rows(path: Path) -> Compared:
    """Raises `UsageError` naming the file, and the row and column that cannot be used."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--rows {path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise UsageError(f"--rows {path}: has no rows")
    if "kind" not in rows[0]:
        named = ", ".join(str(column) for column in rows[0])
        raise UsageError(f"--rows {path}: no column 'kind', which says what a row measures; it has {named}")
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=2):
        where = f"--rows {path}:{number}"
        measured = {metric: row[metric] for metric in metrics() if (row.get(metric) or "").strip()}
        asked = {key: value for key, value in row.items() if key not in measured or key == "kv_tokens"}
        if row.get("kind") == "kv_capacity":
            asked.pop("kv_tokens", None)
        elif row.get("kind") == "serving":
            measured.pop("kv_tokens", None)  # what the engine reported: it is given, not predicted
        predictions = {one.metric: one for one in predict(asked, where)}
        told = [metric for metric in measured if metric in predictions]
        if not told:
            raise UsageError(
                f"{where}: says none of {', '.join(predictions)}, so there is nothing to compare"
            )
        for metric in told:
            try:
                value = float(measured[metric])
            except ValueError:
                raise UsageError(f"{where}: {metric} is '{measured[metric]}', not a number") from None
            if not value > 0:
                raise UsageError(f"{where}: {metric} is {measured[metric]}; a number above 0 is needed")
            one = predictions[metric]
            parts = [row.get(key) or "" for key in ("kind", "kernel", "model", "device", "engine")]
            found.append(
                {
                    "check": " ".join([*(part for part in parts if part), metric]), "row": number,
                    "measured_s": value, "predicted_s": one.value, "low": one.low, "high": one.high,
                }
            )  # fmt: skip
    points = pd.DataFrame(found)
    groups = []
    for name, of in points.groupby("check", sort=False):
        off = (of["predicted_s"] / of["measured_s"] - 1).to_numpy()
        inside = (of["measured_s"] >= of["low"]) & (of["measured_s"] <= of["high"])
        groups.append(
            Group(
                str(name), len(of), float(np.median(off)), float(np.mean(np.abs(off))),
                float(np.quantile(np.abs(off), 0.9)), float(inside.mean()),
            )
        )  # fmt: skip
    return Compared(tuple(groups), points)

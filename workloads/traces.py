"""Length traces: measured lengths in place of priors, from CSV, Parquet or JSONL.

A trace has a row a request (`output_tokens`, perhaps `input_tokens`), or a histogram (`output_tokens` with
`probability`). Common other names of the columns are understood. Rows are drawn at random: a trace says
nothing about groups, so difficulty is not shared in one.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

NAMES = {
    "output_tokens": (
        "output_tokens",
        "output_length",
        "response_tokens",
        "output_toks",
        "completion_tokens",
    ),
    "input_tokens": ("input_tokens", "input_length", "prompt_tokens", "input_toks"),
    "probability": ("probability",),
}
LARGEST = 10_000_000  # tokens; anything longer is a mistake
USUAL_PROMPT = 200  # where a trace has no inputs


class TraceError(ValueError):
    """A trace that cannot be used; one line with file, row and field."""


@dataclass(frozen=True)
class Trace:
    """Rows to draw from, with the cumulative weight of each."""

    file: str
    sha256: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[float, ...]  # cumulative

    def draw(self, rng: random.Random, samples: int) -> tuple[int, list[int]]:
        """(prompt length, lengths of `samples` responses)."""
        rows = [self._row(rng) for _ in range(samples)]
        return self.inputs[rows[0]], [self.outputs[row] for row in rows]

    def _row(self, rng: random.Random) -> int:
        return min(bisect.bisect_right(self.weights, rng.random() * self.weights[-1]), len(self.outputs) - 1)


def read_trace(path: Path) -> Trace:
    """Raises `TraceError`."""
    rows = _rows(path)
    outputs = _column(path, rows, "output_tokens", needed=True)
    inputs = _column(path, rows, "input_tokens", needed=False) or [USUAL_PROMPT] * len(outputs)
    weights = _weights(path, rows)
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    return Trace(path.name, sha, tuple(outputs), tuple(inputs), tuple(accumulate(weights)))


def _rows(path: Path) -> Any:
    import pandas as pd

    readers: dict[str, Callable[[Path], Any]] = {
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
        ".jsonl": _read_jsonl,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: a trace is one of {', '.join(readers)}")
    try:
        rows = reader(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # pandas and pyarrow: not what the ending says
        raise TraceError(f"{path}: {str(error).splitlines()[0]}") from None
    if rows.empty:
        raise TraceError(f"{path}: has no rows")
    return rows


def _read_jsonl(path: Path) -> Any:
    import pandas as pd

    return pd.read_json(path, lines=True)


def _find(rows: Any, field: str) -> str | None:
    return next((name for name in NAMES[field] if name in rows.columns), None)


def _column(path: Path, rows: Any, field: str, needed: bool) -> list[int]:
    name = _find(rows, field)
    if name is None:
        if needed:
            raise TraceError(f"{path}: no column '{field}' (it has {', '.join(map(str, rows.columns))})")
        return []
    found = []
    for number, value in enumerate(rows[name].tolist(), start=1):
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise TraceError(f"{path}: row {number}: {name} is {value!r}, not a length")
        if not 1 <= value <= LARGEST:
            if value == 0 and field == "input_tokens":
                value = 1
            else:
                raise TraceError(f"{path}: row {number}: {name} is {value:g}; lengths are 1 to {LARGEST}")
        found.append(round(value))
    return found


def _weights(path: Path, rows: Any) -> list[float]:
    name = _find(rows, "probability")
    if name is None:
        return [1.0] * len(rows)
    found = rows[name].tolist()
    for number, value in enumerate(found, start=1):
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise TraceError(f"{path}: row {number}: {name} is {value!r}, not a probability")
    if sum(found) <= 0:
        raise TraceError(f"{path}: {name} adds up to {sum(found):g}")
    return [float(value) for value in found]

"""Length traces: measured lengths in place of priors.

A trace has a row a request, or a histogram (`output_tokens` with `probability`); `trace_files.py` says which
files and columns. What a trace says is honoured: rows of one `group_id` are a group, so its difficulty is
shared; rows of the k-th `step` are drawn for the k-th RL step, and those of the last one from then on;
judgements are as long as a row says. Where it says nothing, rows are drawn at random, and judgements come
from the prior.

Requests that failed, and responses without a token, are left out and counted, or refused.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from workloads.trace_files import CHARACTERS_A_TOKEN, Request, TraceError, parts_of, read_requests

__all__ = ["Trace", "TraceError", "read_trace"]

LARGEST = 10_000_000  # tokens; anything longer is a mistake
USUAL_PROMPT = 200  # where a trace has no inputs


@dataclass(frozen=True)
class Trace:
    """Rows to draw from, with the cumulative weight of each. Empty `judges`, `groups`, `steps`: not said."""

    file: str
    sha256: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[float, ...]  # cumulative
    judges: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()  # numbers from 0, in the order of the file
    steps: tuple[int, ...] = ()  # numbers from 0, in the order of their own numbers
    dropped: int = 0  # rows that failed, or had no response
    note: str = ""  # what a reader must know of its lengths

    def describe(self) -> str:
        """What is taken from it, in one line."""
        said = [f"{len(self.outputs)} rows"]
        if self.groups:
            said.append(f"{max(self.groups) + 1} groups")
        if self.steps:
            said.append(f"{max(self.steps) + 1} steps")
        said.append("judgements from the trace" if self.judges else "judgements from the prior")
        if self.dropped:
            said.append(f"{self.dropped} rows that failed or have no response are left out")
        return ", ".join([*said, self.note] if self.note else said)

    def draw(self, rng: random.Random, samples: int, step: int = 0) -> tuple[int, list[int], list[int]]:
        """(prompt length, lengths of `samples` responses, those of their judgements or nothing)."""
        rows = self._rows(rng, samples, step)
        judges = [self.judges[row] for row in rows] if self.judges else []
        return self.inputs[rows[0]], [self.outputs[row] for row in rows], judges

    def _rows(self, rng: random.Random, samples: int, step: int) -> list[int]:
        if not self.groups and not self.steps:
            return [self._any(rng) for _ in range(samples)]
        of_step = self._by_step[min(step, len(self._by_step) - 1)]
        if not self.groups:
            return [rng.choice(of_step) for _ in range(samples)]
        group = self._of_group(of_step)[rng.randrange(len(self._of_group(of_step)))]
        if len(group) >= samples:
            return rng.sample(group, samples)
        return [rng.choice(group) for _ in range(samples)]

    def _any(self, rng: random.Random) -> int:
        return min(bisect.bisect_right(self.weights, rng.random() * self.weights[-1]), len(self.outputs) - 1)

    @cached_property
    def _by_step(self) -> list[tuple[int, ...]]:
        rows = range(len(self.outputs))
        if not self.steps:
            return [tuple(rows)]
        return [tuple(row for row in rows if self.steps[row] == one) for one in range(max(self.steps) + 1)]

    def _of_group(self, rows: tuple[int, ...]) -> list[list[int]]:
        """The groups among the rows of a step, which its first row stands for."""
        if rows[0] not in self._grouped:
            groups: dict[int, list[int]] = {}
            for row in rows:
                groups.setdefault(self.groups[row], []).append(row)
            self._grouped[rows[0]] = list(groups.values())
        return self._grouped[rows[0]]

    @cached_property
    def _grouped(self) -> dict[int, list[list[int]]]:
        return {}


def read_trace(path: Path, refuse_failed: bool = False) -> Trace:
    """Raises `TraceError`; with `refuse_failed` also for a request that failed or has no response."""
    found = read_requests(path)
    kept, dropped = [], 0
    for request in found.rows:
        length = _number(path, request, "output_tokens", request.lengths["output_tokens"])
        if request.failed or length == 0:
            if refuse_failed:
                why = "the request failed" if request.failed else "the response has no token"
                raise TraceError(
                    f"{path}: row {request.row}: {why} (--trace-failed drop leaves such rows out)"
                )
            dropped += 1
            continue
        kept.append(request)
    if not kept:
        raise TraceError(f"{path}: all {dropped} requests failed or have no response")
    columns = {
        field: [_length(path, request, field) for request in kept]
        for field in ("output_tokens", "input_tokens", "judge_tokens")
        if any(request.lengths.get(field) is not None for request in kept)
    }
    weights = [_weight(path, request) for request in kept]
    if sum(weights) <= 0:
        raise TraceError(f"{path}: probability adds up to {sum(weights):g}")
    estimated = f"{', '.join(found.estimated)} estimated: {CHARACTERS_A_TOKEN} characters a token"
    return Trace(
        path.name,
        hashlib.sha256(b"".join(part.read_bytes() for part in parts_of(path))).hexdigest(),
        tuple(columns["output_tokens"]),
        tuple(columns.get("input_tokens", [USUAL_PROMPT] * len(kept))),
        tuple(accumulate(weights)),
        tuple(columns.get("judge_tokens", ())),
        _numbered(path, kept, "group_id", [request.group for request in kept]),
        _numbered(path, kept, "step", [request.step for request in kept]),
        dropped,
        estimated if found.estimated else "",
    )


def _numbered(path: Path, kept: list[Request], field: str, values: list[Any]) -> tuple[int, ...]:
    """Numbers from 0: groups in the order of the file, steps in their own. Nothing where no row has any."""
    known = [value for value in dict.fromkeys(values) if value is not None]
    if not known:
        return ()
    if None in values:
        raise TraceError(f"{path}: row {kept[values.index(None)].row}: has no {field}, and others have")
    order = {value: number for number, value in enumerate(sorted(known) if field == "step" else known)}
    return tuple(order[value] for value in values)


def _number(path: Path, request: Request, field: str, value: object) -> float:
    try:
        if isinstance(value, bool) or value is None or value == "":
            raise ValueError
        number = float(value)  # type: ignore[arg-type]
        if math.isnan(number):
            raise ValueError
    except (TypeError, ValueError):
        raise TraceError(f"{path}: row {request.row}: {field} is {value!r}, not a length") from None
    return number


def _length(path: Path, request: Request, field: str) -> int:
    number = _number(path, request, field, request.lengths.get(field))
    if number == 0 and field != "output_tokens":
        return 1
    if not 1 <= number <= LARGEST:
        raise TraceError(f"{path}: row {request.row}: {field} is {number:g}; lengths are 1 to {LARGEST}")
    return round(number)


def _weight(path: Path, request: Request) -> float:
    try:
        weight = float(request.weight)
    except (TypeError, ValueError):
        weight = -1.0
    if not 0 <= weight <= 1:
        raise TraceError(f"{path}: row {request.row}: probability is {request.weight!r}, not a probability")
    return weight

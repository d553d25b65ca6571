"""The paper's claims beside what came out here. `claims.toml` says what each is, and which runs test it.

| verdict          | the interval of the reproduced value                               |
|------------------|--------------------------------------------------------------------|
| reproduced       | overlaps the claimed range                                         |
| partly           | excludes 1 on the claim's side, but does not reach the range, or is beyond it |
| not reproduced   | neither                                                            |
| not tested       | is not there: the claim says why, or runs of its suite are missing |

The value is the geometric mean over a suite's workloads; its interval is over seeds, each of them averaged
over workloads, because a replicate is a run and a workload is not a draw from anything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.compare import METRICS, Contrast, compare, select
from harness.errors import UsageError, unknown
from harness.stats import Effect, compare_paired
from harness.store import Recorded
from harness.suite import Suite, load_suite

CLAIMS = Path(__file__).parent / "claims.toml"
EQUAL_BOUNDS_MATTER = frozenset({"staleness"})  # each claim says at which bounds it compares


class Ratio(BaseModel):
    """A ratio of two selections of a suite's runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    of: str
    to: str
    metric: str = "throughput"


class Claim(BaseModel):
    """One claim: a range (or a limit), its source, and either a ratio that tests it or why nothing does."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    text: str
    source: str
    low: Annotated[float, Field(gt=0)] | None = None
    high: Annotated[float, Field(gt=0)] | None = None
    note: str = ""
    suite: str | None = None
    grid: int | None = None  # of the suite; None: all of it
    ratio: Ratio | None = None
    untested: str | None = None

    @model_validator(mode="after")
    def _tested_or_not(self) -> Claim:
        if (self.ratio is None) == (self.untested is None):
            raise ValueError("a claim has either a ratio or a reason why it is untested")
        if self.ratio is not None and (self.suite is None or self.low is None or self.high is None):
            raise ValueError("a claim with a ratio needs suite, low and high")
        return self


class ClaimsFile(BaseModel):
    """The table as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    frozen_in: str
    claim: Annotated[list[Claim], Field(min_length=1)]


class Found(StrEnum):
    """Whether a claim came out."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Row:
    """A claim with its verdict."""

    claim: Claim
    verdict: Found
    frozen_in: str
    why: str = ""
    kind: str = ""
    effect: Effect | None = None
    parts: tuple[Contrast, ...] = ()
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id, "claim": claim.text, "low": claim.low, "high": claim.high, "source": claim.source,
            "note": claim.note, "verdict": self.verdict, "why": self.why, "kind": self.kind,
            "reproduced": asdict(self.effect) if self.effect else None,
            "parts": [part.to_json() for part in self.parts], "command": self.command,
            "suite": claim.suite, "frozen_in": self.frozen_in,
        }  # fmt: skip


def read_claims(path: Path = CLAIMS) -> ClaimsFile:
    """Raises `UsageError` naming file and key."""
    try:
        file = ClaimsFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg'].lower()}") from None
    for claim in file.claim:
        if claim.ratio is not None and claim.ratio.metric not in METRICS:
            raise UsageError(f"{path}: {claim.id}: {unknown('metric', claim.ratio.metric, METRICS)}")
    return file


def judge(file: ClaimsFile, runs: Sequence[Recorded], root: Path) -> list[Row]:
    """Every claim with what these runs say of it."""
    suites = {name: load_suite(name) for name in {claim.suite for claim in file.claim if claim.suite}}
    by_cell = {
        run.directory.manifest.get("cell"): run for run in runs
    }  # the newest, since they come oldest first
    return [_judge(claim, file.frozen_in, suites, by_cell, root) for claim in file.claim]


def _judge(
    claim: Claim, frozen_in: str, suites: Mapping[str, Suite], by_cell: Mapping[Any, Recorded], root: Path
) -> Row:
    if claim.ratio is None or claim.suite is None:
        return Row(claim, Found.NOT_TESTED, frozen_in, claim.untested or "")
    command = f"bench sweep {claim.suite} --resume --results {root}; bench claims --results {root}"
    cells = [cell for cell in suites[claim.suite].cells if claim.grid in (None, cell.grid)]
    missing = sum(cell.id not in by_cell for cell in cells)
    if missing:
        why = f"{missing} of {len(cells)} runs of {claim.suite} are missing"
        return Row(claim, Found.NOT_TESTED, frozen_in, why, command=command)
    found = [by_cell[cell.id] for cell in cells]
    for side in (claim.ratio.of, claim.ratio.to):
        select(found, side)
    parts = compare(found, [claim.ratio.to, claim.ratio.of], claim.ratio.metric, EQUAL_BOUNDS_MATTER)
    seeds = sorted(set.intersection(*(set(part.points) for part in parts)))
    means = {seed: geometric_mean([part.points[seed] for part in parts]) for seed in seeds}
    effect = compare_paired(dict.fromkeys(seeds, 1.0), means)
    verdict = _verdict(claim, effect)
    return Row(claim, verdict, frozen_in, claim.note, parts[0].kind, effect, tuple(parts), command)


def _verdict(claim: Claim, effect: Effect) -> Found:
    assert claim.low is not None
    assert claim.high is not None
    if effect.low <= claim.high and effect.high >= claim.low:
        return Found.REPRODUCED
    gained = effect.low > 1 if claim.low > 1 else effect.high < 1
    return Found.PARTLY if gained else Found.NOT_REPRODUCED

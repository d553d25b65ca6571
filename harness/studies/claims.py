"""The paper's claims beside what came out here. `claims.toml` says what each is, and which runs test it.

| verdict        | what came out                                                                        |
|----------------|--------------------------------------------------------------------------------------|
| reproduced     | a gain that is shown (interval and rank test), whose interval overlaps the range     |
| partly         | a gain that is shown, but does not reach the range, or is beyond it                  |
| not reproduced | no gain is shown, though there are runs enough to show one                           |
| not tested     | nothing: the claim says why, runs of its suite are missing, or they are too few      |

The value is the geometric mean over a suite's workloads; its interval is over seeds, each of them averaged
over workloads, because a replicate is a run and a workload is not a draw from anything. Where runs are on
plausible machines, each machine is judged by its own seeds, and `deciding_share` of them must agree.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.errors import BenchError, InvalidRun, UsageError, unknown
from harness.inputs import read_toml
from harness.results.record import RunDirectory
from harness.results.tables import Recorded, Replicate
from harness.studies.compare import METRICS, Contrast, compare, paired_effect
from harness.studies.stats import (
    DECIDING_SHARE,
    FEWEST_FOR_A_VERDICT,
    Effect,
    OverMachines,
    Verdict,
    compare_paired,
)
from harness.studies.suite import Suite, load_suite
from harness.studies.sweep import ledger

CLAIMS = Path(__file__).parent / "claims.toml"
EQUAL_BOUNDS_MATTER = frozenset({"staleness"})  # each claim says at which bounds it compares
FEWEST_PAIRS = FEWEST_FOR_A_VERDICT[True]


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
    deciding_share: Annotated[float, Field(gt=0.5, le=1)] = DECIDING_SHARE  # of plausible machines
    claim: Annotated[list[Claim], Field(min_length=1)]


class Found(StrEnum):
    """Whether a claim came out."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Row:
    """A claim with its verdict. `notes` are what a reader must know of the runs."""

    claim: Claim
    verdict: Found
    frozen_in: str
    why: str = ""
    kind: str = ""
    effect: Effect | None = None
    parts: tuple[Contrast, ...] = ()
    command: str = ""
    notes: tuple[str, ...] = ()
    machines: OverMachines | None = None  # None: on the nominal machine alone

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id, "claim": claim.text, "low": claim.low, "high": claim.high, "source": claim.source,
            "note": claim.note, "verdict": self.verdict, "why": self.why, "kind": self.kind,
            "reproduced": asdict(self.effect) if self.effect else None,
            "parts": [part.to_json() for part in self.parts], "command": self.command,
            "machines": asdict(self.machines) if self.machines else None,
            "suite": claim.suite, "frozen_in": self.frozen_in, "notes": list(self.notes),
        }  # fmt: skip


def read_claims(path: Path = CLAIMS) -> ClaimsFile:
    """Raises `UsageError` naming file and key."""
    file = read_toml(path, ClaimsFile)
    for claim in file.claim:
        if claim.ratio is not None and claim.ratio.metric not in METRICS:
            raise UsageError(f"{path}: {claim.id}: {unknown('metric', claim.ratio.metric, METRICS)}")
    return file


def runs_of(file: ClaimsFile, root: Path, any_code: bool = False) -> dict[str, dict[str, Recorded]]:
    """By suite and cell, the complete runs in `root`; only of this code, if not of any."""
    found: dict[str, dict[str, Recorded]] = {}
    for name in {claim.suite for claim in file.claim if claim.suite}:
        done = ledger(load_suite(name), root, any_code).done
        found[name] = {
            cell: Recorded(RunDirectory(root / manifest["run"], manifest)) for cell, manifest in done.items()
        }
    return found


def judge(
    file: ClaimsFile, runs: Mapping[str, Mapping[str, Recorded]], root: Path, path: Path = CLAIMS
) -> list[Row]:
    """Every claim with what these runs say of it; `root` and `path` are for the command."""
    suites = {name: load_suite(name) for name in {claim.suite for claim in file.claim if claim.suite}}
    rows = []
    for claim in file.claim:
        if claim.ratio is None or claim.suite is None:
            rows.append(Row(claim, Found.NOT_TESTED, file.frozen_in, claim.untested or ""))
            continue
        try:
            row = _tested(claim, suites[claim.suite], runs.get(claim.suite, {}), file.deciding_share)
        except InvalidRun:
            raise  # a file that is not what was sealed is no reason to leave a claim untested
        except BenchError as error:
            row = Row(claim, Found.NOT_TESTED, "", str(error))
        rows.append(replace(row, frozen_in=file.frozen_in, command=_command(claim.suite, root, path)))
    return rows


def _command(suite: str, root: Path, path: Path) -> str:
    results = ["--results", str(root)]
    table = [] if path == CLAIMS else ["--claims", str(path)]
    return " && ".join(
        shlex.join(words)
        for words in (["bench", "sweep", suite, "--resume", *results], ["bench", "claims", *table, *results])
    )


def _tested(claim: Claim, suite: Suite, runs: Mapping[str, Recorded], share: float) -> Row:
    if claim.ratio is None:
        raise UsageError(f"{claim.id} has no ratio that runs could test")
    cells = [cell for cell in suite.cells if claim.grid is None or claim.grid in cell.grids]
    if not cells:
        raise UsageError(f"{suite.name} has no grid {claim.grid}")
    missing = sum(cell.id not in runs for cell in cells)
    if missing:
        return Row(claim, Found.NOT_TESTED, "", f"{missing} of {len(cells)} runs of {suite.name} are missing")
    found = [runs[cell.id] for cell in cells]
    parts = compare(found, [claim.ratio.to, claim.ratio.of], claim.ratio.metric, EQUAL_BOUNDS_MATTER)
    pairs = sorted(set.intersection(*(set(part.points) for part in parts)))
    points = {pair: geometric_mean([part.points[pair] for part in parts]) for pair in pairs}
    effect, machines = paired_effect(points)
    verdict, why = _verdict(claim, effect) if machines is None else _over_machines(claim, points, share)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Row(
        claim, verdict, "", why or claim.note, parts[0].kind, effect, tuple(parts), notes=notes,
        machines=machines,
    )  # fmt: skip


def _over_machines(claim: Claim, points: Mapping[Replicate, float], share: float) -> tuple[Found, str]:
    """What most plausible machines say: each is judged by its own seeds, and `share` of them must agree."""
    found = []
    for machine in sorted({pair.machine for pair in points}):
        own = {pair.seed: ratio for pair, ratio in points.items() if pair.machine == machine}
        found.append(_verdict(claim, compare_paired(dict.fromkeys(own, 1.0), own))[0])
    if Found.NOT_TESTED in found:
        return Found.NOT_TESTED, f"too few seeds on a machine; at least {FEWEST_PAIRS} are needed"
    within = found.count(Found.REPRODUCED) / len(found)
    shown = within + found.count(Found.PARTLY) / len(found)
    why = (
        f"in the range on {within:.0%} of {len(found)} plausible machines, a gain on {shown:.0%}; "
        f"{share:.0%} must agree"
    )
    if within >= share:
        return Found.REPRODUCED, why
    return (Found.PARTLY if shown >= share else Found.NOT_REPRODUCED), why


def _verdict(claim: Claim, effect: Effect) -> tuple[Found, str]:
    """Why, where the verdict alone does not say it."""
    if claim.low is None or claim.high is None:
        raise UsageError(f"{claim.id} has no range that an effect could be in")
    if effect.n < FEWEST_PAIRS:
        return Found.NOT_TESTED, f"{effect.n} seeds can show nothing; at least {FEWEST_PAIRS} are needed"
    wanted = Verdict.FASTER if claim.low > 1 else Verdict.SLOWER
    if effect.verdict is not wanted:
        return Found.NOT_REPRODUCED, "no gain is shown" if effect.verdict is Verdict.INCONCLUSIVE else ""
    overlaps = effect.low <= claim.high and effect.high >= claim.low
    return (Found.REPRODUCED if overlaps else Found.PARTLY), ""

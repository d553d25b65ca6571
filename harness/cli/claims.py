"""`bench claims`: what the paper says, and what came out."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli import options
from harness.cli.compare import over
from harness.errors import CheckFailed
from harness.studies.claims import CLAIMS, Found, Row, judge, read_claims, runs_of


@click.command("claims")
@click.option("--claims", "path", type=options.FILE, default=CLAIMS, help="Another table of claims.")
@click.option("--any-code", is_flag=True, help="Whatever version of the code made the runs.")
@options.results
@options.as_json("A JSON array on stdout, an object a claim.")
def command(path: Path, any_code: bool, results: Path, as_json: bool) -> None:
    """The paper's claims beside the runs in --results: value, interval, verdict, and the command for it.

    Ends with 1 if a claim that was tested is not reproduced.
    """
    options.note_unreadable(results)
    file = read_claims(path)
    rows = judge(file, runs_of(file, results, any_code), results, path)
    click.echo(json.dumps([row.to_json() for row in rows]) if as_json else render(rows, file.frozen_in))
    failed = [row.claim.id for row in rows if row.verdict is Found.NOT_REPRODUCED]
    if failed:
        raise CheckFailed(f"not reproduced: {', '.join(failed)}")


def render(rows: list[Row], frozen_in: str) -> str:
    """A paragraph a claim, with a line a workload."""
    lines = [f"suites frozen in commit {frozen_in}"]
    for row in rows:
        claim = row.claim
        spread = f"{claim.low:.2f} to {claim.high:.2f} x" if claim.low and claim.high else "-"
        lines.append(f"{claim.id}: {claim.text}")
        lines.append(f"  claimed     {spread} (quoted: {claim.source})")
        if row.effect is not None:
            effect = row.effect
            lines.append(
                f"  reproduced  {effect.ratio:.2f} x [{effect.low:.2f}, {effect.high:.2f}] over {effect.n} "
                f"seeds ({row.kind}), "
                + (f"machines: {over(row.machines)}" if row.machines else "on the nominal machine alone")
            )
            lines += [
                f"    {part.effect.ratio:.2f} x [{part.effect.low:.2f}, {part.effect.high:.2f}]  "
                f"{part.workload}; staleness {part.contender.staleness:.2f} / {part.baseline.staleness:.2f}"
                for part in row.parts
            ]
        lines.append(f"  verdict     {row.verdict}" + (f" ({row.why})" if row.why else ""))
        lines += [f"  note        {note}" for note in row.notes]
        if runs := sum(len(side.runs) for part in row.parts for side in (part.baseline, part.contender)):
            lines.append(f"  runs        {runs}; --json lists them")
        if row.command:
            lines.append(f"  command     {row.command}")
    return "\n".join(lines)

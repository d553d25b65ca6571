"""`bench validate`: the simulator against public measurements, as a table and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.errors import CHECK_FAILED
from systems.machine.files import replace_file

if TYPE_CHECKING:
    from harness.fit.checks import Report


@click.command("validate")
@click.option("--data", type=options.FILE, required=True, help="The folder of public measurements.")
@options.out("results/validation")
@options.as_json("The rows as JSON on stdout.")
def command(data: Path, out: Path, as_json: bool) -> None:
    """Predict measurements that nobody here made, and say how far off the simulator is.

    Ends with 1 if a gated check misses its target.
    """
    from harness.fit.checks import validate
    from paper_figures.style import label_kind, save, theme
    from paper_figures.validation import draw

    report = validate(data)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "validation.json", json.dumps(report.to_json(), indent=1) + "\n")
    theme()
    figure = draw(report.points)
    label_kind(figure, "simulated against measured and quoted")
    save(figure, report.points, out, "predicted-against-measured")
    click.echo(json.dumps(report.to_json()) if as_json else render(report))
    if any(check.met is False for check in report.checks):
        sys.exit(CHECK_FAILED)


def render(report: Report) -> str:
    """A row a check."""
    lines = [f"{'check':<46}{'error':>8}{'target':>9}  met"]
    for check in report.checks:
        target = f"{check.target:.0%}" if check.target is not None else "-"
        met = {True: "yes", False: "NO", None: "-"}[check.met]
        lines.append(f"{check.name:<46}{check.value:>+8.1%}{target:>9}  {met:<4}{check.note}")
    return "\n".join(lines)

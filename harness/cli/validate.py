"""`bench validate`: the simulator against public measurements, as a table and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.errors import CHECK_FAILED, UsageError
from systems.machine.files import replace_file

if TYPE_CHECKING:
    from harness.fit.checks import Report
    from harness.fit.rows import Compared


@click.command("validate")
@click.option("--data", type=options.FILE, help="The folder of public measurements.")
@click.option("--rows", type=options.FILE, help="Your own measurements, a CSV file (docs/simulator.md).")
@options.out("results/validation")
@options.as_json("The rows as JSON on stdout.")
def command(data: Path | None, rows: Path | None, out: Path, as_json: bool) -> None:
    """Predict measurements that nobody here made, or your own, and say how far off the simulator is.

    With --data it ends with 1 if a gated check misses its target.
    """
    if (data is None) == (rows is None):
        raise UsageError("give --data, the folder of public measurements, or --rows, a file of your own")
    if rows is not None:
        own_rows(rows, out, as_json)
    elif data is not None:
        public(data, out, as_json)


def own_rows(rows: Path, out: Path, as_json: bool) -> None:
    """A table of signed errors by group, and a figure."""
    from harness.fit.rows import compare_rows
    from paper_figures.style import label_kind, save, theme
    from paper_figures.validation import draw

    found = compare_rows(rows)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "rows.json", json.dumps(found.to_json(), indent=1) + "\n")
    theme()
    figure = draw(found.points)
    label_kind(figure, "simulated against measured")
    save(figure, found.points, out, "rows")
    click.echo(json.dumps(found.to_json()) if as_json else render_groups(found))


def render_groups(found: Compared) -> str:
    """A row a group."""
    lines = [f"{'group':<58}{'rows':>5}{'median':>9}{'MAPE':>8}{'p90':>8}{'in band':>9}"]
    lines += [
        f"{one.name:<58}{one.rows:>5}{one.median:>+9.1%}{one.mape:>8.1%}{one.p90:>8.1%}{one.inside:>9.0%}"
        for one in found.groups
    ]
    return "\n".join(lines)


def public(data: Path, out: Path, as_json: bool) -> None:
    """Every check against public measurements, with its target."""
    from harness.fit.checks import validate
    from harness.studies.published import ratio_checks
    from paper_figures.style import label_kind, save, theme
    from paper_figures.validation import draw

    report = validate(data, ratio_checks(data))
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

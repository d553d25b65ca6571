"""`bench figures`: draw figures from recorded runs."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli import options
from harness.errors import unknown
from harness.results.comparable import check_names
from harness.results.tables import open_runs
from paper_figures.side_by_side import FIGURES_ALLOW, side_by_side


@click.command("figures")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--run", "runs", multiple=True, help="A run's id, path or part of its id; repeatable. Default: all."
)
@click.option("--kind", help="Only runs of this kind.")
@click.option(
    "--allow", multiple=True, metavar="|".join(FIGURES_ALLOW), help="Draw runs together in spite of it."
)
@options.results
@options.out("results/figures")
def command(
    names: tuple[str, ...], runs: tuple[str, ...], kind: str | None, allow: tuple[str, ...], results: Path,
    out: Path,
) -> None:  # fmt: skip
    """Draw NAME... (throughput, timeline, shift-breakdown) as PDF and PNG, with the CSV behind them.

    Runs stand side by side as in a comparison: of one kind and workload, at equal staleness. The paper
    compares systems at bounds of their own: --allow staleness draws that, and the picture says so.
    """
    from paper_figures.registry import FIGURES
    from paper_figures.style import label_kind, save, theme

    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    options.note_unreadable(results)
    allowed = check_names(allow, FIGURES_ALLOW)
    shown = side_by_side(open_runs(results, runs, kind), allowed)
    label = str(shown.runs[0].kind)
    for caveat in ("extrapolated", "oversubscribed"):
        if any(run.summary.get(caveat) for run in shown.runs):
            label += f", {caveat}"
    label = "; ".join([label, *shown.notes])
    tables = {name: FIGURES[name].data(shown.runs) for name in names}  # all are refused, or none
    theme()
    for name, table in tables.items():
        figure = FIGURES[name].draw(table)
        label_kind(figure, label)
        for path in save(figure, table, out, name):
            click.echo(path)

"""`bench export`: a run in another tool's format."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli import options
from harness.errors import unknown
from harness.results.tables import open_runs, reservations


@click.command("export")
@click.argument("run")
@click.option("--format", "form", required=True, metavar="parquet|csv|perfetto")
@options.out("results/exports")
@options.results
def command(run: str, form: str, out: Path, results: Path) -> None:
    """Write RUN as tables (steps, device intervals, shift phases, events) or a trace for ui.perfetto.dev."""
    from harness.results.export import FORMATS, export

    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    (chosen,) = open_runs(results, [run])
    chosen.directory.check()
    for path in export(chosen, form, out):
        click.echo(path)
    for note in reservations([chosen]):
        click.echo(note, err=True)

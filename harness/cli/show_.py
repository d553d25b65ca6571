"""`bench show`: a run's summary again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.summary import render
from harness.record import RUNS, RunDirectory
from harness.runner import recompute
from harness.store import read_summary


@click.command("show")
@click.argument("run")
@click.option("--recompute", "again", is_flag=True, help="Derive the summary from the events anew.")
@click.option("--results", type=click.Path(path_type=Path), default=RUNS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(run: str, again: bool, results: Path, as_json: bool) -> None:
    """Show the summary of RUN: its id, its path, or an unambiguous part of its id."""
    directory = RunDirectory.open(results, run)
    summary = recompute(directory) if again else read_summary(directory)
    manifest = directory.manifest
    ended = {key: manifest[key] for key in ("status", "reason") if key in manifest}
    whole = manifest["status"] == "complete"
    if as_json:
        click.echo(json.dumps(summary if whole else {**summary, **ended}))
        return
    if not whole:
        steps = f"{len(summary['steps'])} of {manifest['spec']['steps']} steps"
        click.echo(
            ": ".join([f"{ended['status']} after {steps}", *([ended["reason"]] if "reason" in ended else [])])
        )
    click.echo(render(summary))

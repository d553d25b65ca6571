"""`bench show`: a run's summary again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli import options
from harness.cli.summary import render
from harness.results.loss import render as render_loss
from harness.results.record import RunDirectory
from harness.results.tables import read_summary
from harness.runs.runner import recompute


@click.command("show")
@click.argument("run")
@click.option("--recompute", "again", is_flag=True, help="Derive the summary from the events anew.")
@click.option("--loss", is_flag=True, help="Where the time beyond the lower bound went, by cause.")
@options.results
@options.as_json("One JSON object on stdout.")
def command(run: str, again: bool, loss: bool, results: Path, as_json: bool) -> None:
    """Show the summary of RUN: its id, its path, or an unambiguous part of its id.

    All files of the run are checked against its seal first; one that is not what was sealed ends this with 5.
    """
    directory = RunDirectory.open(results, run)
    directory.check()
    summary = recompute(directory) if again else read_summary(directory)
    if loss and "loss" not in summary:  # of a run before there was one
        summary = recompute(directory)
    manifest, unverified = directory.manifest, directory.unverified
    whole = directory.status == "complete"
    ended = {"status": directory.status, **({"reason": manifest["reason"]} if "reason" in manifest else {})}
    if as_json:
        said = {**({} if whole else ended), **({"unverified": unverified} if unverified else {})}
        click.echo(json.dumps({**summary, **said}))
        return
    if not whole:
        steps = f"{len(summary['steps'])} of {manifest['spec']['steps']} steps"
        click.echo(
            ": ".join([f"{ended['status']} after {steps}", *([ended["reason"]] if "reason" in ended else [])])
        )
    click.echo(render_loss(summary["loss"], summary) if loss else render(summary))
    click.echo(f"files            {trust(directory)}")


def trust(directory: RunDirectory) -> str:
    """Whether what is shown is what was sealed, and of which files that can be said."""
    if directory.unverified:
        return f"unverified: {directory.unverified}"
    return f"verified: {' and '.join(directory.sealed)} are what was sealed"

"""`bench fit`: the simulator's coefficients from public measurements."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli import options


@click.command("fit")
@click.option("--data", type=options.FILE, required=True, help="The folder of public measurements.")
@click.option("--out", type=options.FILE, help="A folder. Default: the simulator's own.")
@options.quiet
def command(data: Path, out: Path | None, quiet: bool) -> None:
    """Fit what the simulator's kernels, engines and training cost to public measurements."""
    from harness.fit.coefficients import fit_all, write
    from systems.costs import kernels

    said = (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))
    for path in write(fit_all(data, said), data, out or kernels.HERE):
        click.echo(f"written          {path}")

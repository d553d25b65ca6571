"""`bench run`: one system, one model group, one seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.cli import options
from harness.cli.progress import Progress
from harness.cli.summary import machine_lines, render
from harness.errors import UsageError
from harness.results.wandb import MODES, Mirror, chosen_mode
from harness.runs.backends import BACKENDS
from harness.runs.plausible import render_spread, spread
from harness.runs.runner import run
from harness.runs.spec import RunSpec, resolve
from harness.studies.sensitivity import render_sensitivity, variants
from harness.studies.split import AUTO, best_split, with_split


@click.command("run")
@click.option("--system", required=True, help="Who decides where GPUs work; see 'bench list systems'.")
@click.option("--model", required=True, help="Model group: a policy and a judge; see 'bench list models'.")
@click.option(
    "--backend", type=click.Choice(list(BACKENDS)), help="Default: cosim where weights are real, else sim."
)
@click.option("--steps", type=int, default=20, show_default=True, help="RL steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--staleness",
    type=int,
    help="Bound on policy versions between generation and training. Default: the system's own.",
)
@options.request
@click.option(
    "--sensitivity", is_flag=True, help="Also with each cost coefficient 20 % lower and higher (simulated)."
)
@click.option(
    "--machine", metavar="K/N", help="On the K-th of N plausible machines. Default: the nominal one."
)
@click.option(
    "--machines", type=int, help="Also on so many plausible machines, drawn from the coefficients' bands."
)
@click.option(
    "--calibration",
    type=options.FILE,
    help="What live workers cost here, from 'bench calibrate'. Default: the project's own.",
)
@click.option(
    "--wandb",
    "wandb_mode",
    metavar="|".join(MODES),
    help="Mirror to W&B. Default: $WANDB_MODE, or offline if W&B is installed.",
)
@options.results
@options.as_json("One JSON object on stdout (schema: docs/results-format.md).")
@options.quiet
def command(
    system: str, model: str, backend: str | None, steps: int, seed: int, staleness: int | None,
    request: dict[str, Any], sensitivity: bool, machine: str | None, machines: int | None,
    calibration: Path | None, wandb_mode: str | None, results: Path, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run one system on one model group and record it."""
    searched = request["split"] == AUTO
    spec = resolve(
        system=system, model=model, backend=backend, steps=steps, seed=seed, staleness=staleness,
        calibration=calibration, **{**request, **({"split": None} if searched else {})},
    )  # fmt: skip
    if searched:
        best = best_split(spec, told=(lambda _: None) if quiet else lambda line: click.echo(line, err=True))
        spec = with_split(spec, (best.train, best.rollout, best.reward))
        click.echo(best.describe(), err=True)
    mode = chosen_mode(wandb_mode)
    check_sensitivity(spec, sensitivity, as_json)
    if machine is not None:
        if machines is not None:
            raise UsageError("--machine is one of them, --machines all: give one of the two")
        spec = spec.on_machine(*one_of(machine))
    drawn = [spec.on_machine(number, machines) for number in range(1, machines + 1)] if machines else []
    if machines is not None and not drawn:
        raise UsageError(f"--machines {machines}: at least 1")

    def recorded(one: RunSpec) -> dict[str, Any]:
        with Progress(one, quiet) as progress:
            result = run(
                one, results, started=progress.started, stepped=progress.stepped, mirror=Mirror(mode)
            )
        progress.warn(result.summary["warnings"])
        progress.mirrored(result.directory.manifest["wandb"])
        return result.summary

    summary = recorded(spec)
    if not as_json:
        click.echo(render(summary))
        click.echo("\n".join(machine_lines(spec)))
    if not drawn:
        if as_json:
            click.echo(json.dumps(summary))
        if sensitivity:
            click.echo(render_sensitivity(summary, variants(spec)))
        return
    others = [recorded(one) for one in drawn]
    found = spread(summary, others)
    told = {"nominal": summary, "machines": others, "spread": found}
    click.echo(json.dumps(told) if as_json else render_spread(found, len(drawn), spec.kind))


def one_of(machine: str) -> tuple[int, int]:
    """'3/16' as 3 of 16. Raises `UsageError`."""
    number, slash, of = machine.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and int(number) >= 1):
        raise UsageError(f"--machine {machine}: expected K/N, as in 3/16")
    return int(number), int(of)


def check_sensitivity(spec: RunSpec, wanted: bool, as_json: bool) -> None:
    if wanted and spec.on.real:
        raise UsageError("--sensitivity varies simulated costs: give --backend sim")
    if wanted and as_json:
        raise UsageError("--sensitivity prints a table: leave --json out")

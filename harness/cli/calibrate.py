"""`bench calibrate`: measure or fit what things cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from harness.cli import options
from harness.errors import UnfitError, UsageError, unknown


@click.command("calibrate")
@click.option("--live", is_flag=True, help="Measure the tiny models on this machine's own workers.")
@click.option("--data", type=options.FILE, help="Fit the simulator to the public measurements in DIR.")
@click.option("--model", "models", multiple=True, help="Live: a group with real weights. Default: all.")
@click.option("--workers", type=int, help="Live: worker processes. Default: one a core, two at least.")
@click.option(
    "--out",
    type=options.FILE,
    help="Live: a file (results/calibration.toml). Data: a folder (the simulator's own).",
)
@options.quiet
def command(
    live: bool, data: Path | None, models: tuple[str, ...], workers: int | None, out: Path | None, quiet: bool
) -> None:  # fmt: skip
    """Measure what things cost here (--live), or fit the simulator's coefficients (--data DIR)."""
    if live == (data is not None):
        raise UsageError("calibrate what? give --live or --data DIR")
    said = (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))
    if data is None:
        _live(models, workers, out or Path("results/calibration.toml"), said)
        return
    if models or workers is not None:
        raise UsageError("--model and --workers are for --live")
    from harness.fit.coefficients import fit_all, write
    from systems.costs import kernels

    for path in write(fit_all(data, said), out or kernels.HERE):
        click.echo(f"written          {path}")


def _live(models: tuple[str, ...], workers: int | None, out: Path, said: Callable[[str], None]) -> None:
    from harness.runs.spec import cores
    from workloads.groups import group_names, load_group

    real = [name for name in group_names() if load_group(name).real]
    for model in models:
        if model not in real:
            raise unknown("model with real weights", model, real)
    workers = max(2, cores()) if workers is None else workers
    if not 1 <= workers <= 8:
        raise UsageError(f"--workers {workers}: between 1 and 8")

    from harness.runs.live_costs import save_calibration
    from harness.runs.measure_live import calibrate
    from systems.backends.base import ClusterUnfit, WorkerLost

    try:
        calibration = calibrate(models or real, workers, said)
    except (ClusterUnfit, WorkerLost) as error:
        raise UnfitError(str(error)) from None
    save_calibration(calibration, out)
    for name, fit in calibration.groups.items():
        errors = (
            f"rollout {fit.rollout.held_out_error:.0%}, reward {fit.reward.held_out_error:.0%}, "
            f"training {fit.training.held_out_error:.0%}"
        )
        click.echo(f"{name:<16}mean error of held-out rounds: {errors} (measured)")
    click.echo(f"written          {out}")

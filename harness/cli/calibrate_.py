"""`bench calibrate`: measure what things cost."""

from __future__ import annotations

from pathlib import Path

import click

from harness.errors import UnfitError, UsageError, unknown


@click.command("calibrate")
@click.option("--live", is_flag=True, help="The tiny models on this machine's own workers.")
@click.option("--model", "models", multiple=True, help="A group with real weights; repeatable. Default: all.")
@click.option("--workers", type=int, help="Worker processes. Default: one a core, two at least.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("results/calibration.toml"), show_default=True
)
@click.option("--quiet", is_flag=True, help="No progress.")
def command(live: bool, models: tuple[str, ...], workers: int | None, out: Path, quiet: bool) -> None:
    """Measure what things cost here, and fit the cost model's coefficients."""
    from harness.spec import cores
    from workloads.groups import group_names, load_group

    if not live:
        raise UsageError("nothing to calibrate: give --live")
    real = [name for name in group_names() if load_group(name).real]
    for model in models:
        if model not in real:
            raise unknown("model with real weights", model, real)
    workers = max(2, cores()) if workers is None else workers
    if not 1 <= workers <= 8:
        raise UsageError(f"--workers {workers}: between 1 and 8")

    from harness.calibrate import calibrate
    from harness.calibration import save_calibration
    from systems.backends.base import ClusterUnfit, WorkerLost

    said = (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))
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

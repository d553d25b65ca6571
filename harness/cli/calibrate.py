"""`bench calibrate`: what the tiny models cost on this machine's live workers."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli import options
from harness.errors import UnfitError, UsageError, unknown


@click.command("calibrate")
@click.option("--model", "models", multiple=True, help="A group with real weights; repeatable. Default: all.")
@click.option("--workers", type=int, help="Worker processes. Default: one a core, two at least.")
@click.option("--out", type=options.FILE, default=Path("results/calibration.toml"), show_default=True)
@click.option("--data", type=options.FILE, hidden=True)  # headings of committed coefficients still name it
@options.quiet
def command(
    models: tuple[str, ...], workers: int | None, out: Path, data: Path | None, quiet: bool
) -> None:  # fmt: skip
    """Measure what the tiny models cost on this machine, with all workers busy at once.

    Live runs take the file that it writes by --calibration: their planner starts from it.
    """
    if data is not None:
        raise UsageError(f"--data: the simulator is fitted by 'bench fit --data {data}'")
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

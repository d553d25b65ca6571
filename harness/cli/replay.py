"""`bench replay`: a recorded run again, its decisions and its times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from harness.cli import options
from harness.errors import CHECK_FAILED, UsageError
from harness.results.record import RunDirectory
from harness.runs.backends import BACKENDS
from harness.runs.live_costs import load_calibration
from harness.runs.replay import Replay, replay


@click.command("replay")
@click.argument("run")
@click.option("--calibration", type=options.FILE, help="Other costs than those the live run started from.")
@options.results
@options.as_json("One JSON object on stdout.")
def command(run: str, calibration: Path | None, results: Path, as_json: bool) -> None:
    """Give RUN's recorded views to its policy again, and its lengths to the simulator.

    Ends with 1 if a plan is not the recorded one.
    """
    directory = RunDirectory.open(results, run)
    live = BACKENDS[directory.manifest["spec"]["backend"]].measured
    if calibration is not None and not live:
        raise UsageError(f"--calibration {calibration}: {directory.id} is not a live run")
    model = directory.manifest["spec"]["group"]["name"]
    costs = load_calibration(calibration).of(model) if calibration is not None else None
    result = replay(directory, costs)
    click.echo(json.dumps(result.to_json()) if as_json else render(result))
    if result.differing:
        sys.exit(CHECK_FAILED)


def render(result: Replay) -> str:
    plans = f"all {result.decisions} plans are those recorded"
    if result.differing:
        moments = ", ".join(f"{moment:.3f} s" for moment in result.differing[:5])
        plans = f"{len(result.differing)} of {result.decisions} plans differ, first at {moments}"
    lines = [
        f"run              {result.run}",
        *([f"files            unverified: {result.unverified}"] if result.unverified else []),
        f"decisions        {plans}",
        f"{'step':>6}{result.kind:>14} s{'simulated s':>14}{'error':>10}",
    ]
    rows = zip(result.recorded_s, result.simulated_s, result.errors, strict=True)
    lines += [
        f"{index + 1:>6}{recorded:>16.3f}{simulated:>14.3f}{error:>+10.1%}"
        for index, (recorded, simulated, error) in enumerate(rows)
    ]
    absolute = sum(map(abs, result.errors)) / len(result.errors)
    lines.append(f"step-time error  {absolute:.1%} mean absolute; makespan {result.makespan_error:+.1%}")
    return "\n".join(lines)

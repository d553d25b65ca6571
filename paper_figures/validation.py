"""`bench validate`: the simulator against public measurements, as a table and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.errors import CHECK_FAILED
from systems.files import replace_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from harness.validation import Report


@click.command("validate")
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="The folder of public measurements."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/validation"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The rows as JSON on stdout.")
def command(data: Path, out: Path, as_json: bool) -> None:
    """Predict measurements that nobody here made, and say how far off the simulator is.

    Ends with 1 if a gated check misses its target.
    """
    from harness.validation import validate
    from paper_figures.style import label_kind, save, theme

    report = validate(data)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "validation.json", json.dumps(report.to_json(), indent=1) + "\n")
    theme()
    figure = draw(report.points)
    label_kind(figure, "simulated against measured and quoted")
    save(figure, report.points, out, "predicted-against-measured")
    click.echo(json.dumps(report.to_json()) if as_json else render(report))
    if any(check.met is False for check in report.checks):
        sys.exit(CHECK_FAILED)


def render(report: Report) -> str:
    """A row a check."""
    lines = [f"{'check':<46}{'error':>8}{'target':>9}  met"]
    for check in report.checks:
        target = f"{check.target:.0%}" if check.target is not None else "-"
        met = {True: "yes", False: "NO", None: "-"}[check.met]
        lines.append(f"{check.name:<46}{check.value:>+8.1%}{target:>9}  {met:<4}{check.note}")
    return "\n".join(lines)


LIMITS = (0.3, 4.0)  # of the picture; what is beyond them is written at the edge


def draw(points: pd.DataFrame) -> Figure:
    """Predicted over measured, a row a check and a point a measurement, with each row's median."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, PercentFormatter

    from paper_figures.style import PALETTE

    names = list(dict.fromkeys(points["check"]))
    figure, axis = plt.subplots(figsize=(7.0, 0.8 + 0.26 * len(names)), layout="constrained")
    axis.axvspan(0.9, 1.1, color="#e4e4e4", linewidth=0)
    axis.axvline(1.0, color="black", linewidth=0.8)
    for row, name in enumerate(names):
        chosen = points[points["check"] == name]
        ratio = (chosen["predicted_s"] / chosen["measured_s"]).to_numpy()
        beyond = [value for value in ratio if not LIMITS[0] < value < LIMITS[1]]
        for value in beyond:
            edge = LIMITS[int(value > 1)]
            side = "right" if value > 1 else "left"
            axis.text(edge, row, f"{value:.0%}", ha=side, va="center", fontsize=6, color=PALETTE[3])
        ratio = np.array([value for value in ratio if LIMITS[0] < value < LIMITS[1]])
        if not len(ratio):
            continue
        spread = 0.5 * ((np.arange(len(ratio)) * 0.618) % 1.0 - 0.5)  # so that points do not hide each other
        axis.scatter(ratio, row + spread, s=6, alpha=0.5, linewidths=0, color=PALETTE[0])
        axis.plot([np.median(ratio)] * 2, [row - 0.35, row + 0.35], color=PALETTE[3], linewidth=1.6)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names), -1)
    axis.set_xscale("log")
    axis.set_xlim(*LIMITS)
    axis.xaxis.set_major_locator(FixedLocator([0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel("predicted over measured or quoted; grey: within 10 %, red: median", fontsize=8)
    return figure

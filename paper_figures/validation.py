"""Predicted over measured: every check of the simulator, a point a measurement."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, PercentFormatter

from paper_figures.style import PALETTE

LIMITS = (0.3, 4.0)  # of the picture; what is beyond them is written at the edge


def draw(points: pd.DataFrame) -> Figure:
    """Predicted over measured, a row a check and a point a measurement, with each row's median."""
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

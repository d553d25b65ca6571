"""Generated tokens a second, by model group and system: bars are means over seeds, points are runs."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.results.tables import Recorded, throughput_table
from paper_figures.side_by_side import staleness_label
from paper_figures.style import system_order, system_style

MOST_COLUMNS = 3  # panels beside each other
LEAST_PANEL, BAR = 2.9, 0.95  # inches: of a panel, and of a bar with its name under it
JUDGE_ALPHA = 0.45  # the judge's tokens are the pale part of a bar


def data(runs: Sequence[Recorded]) -> pd.DataFrame:
    """A row a run, of runs that may stand side by side."""
    table = throughput_table(runs)
    table["system"] = pd.Categorical(table["system"], system_order(table["system"]), ordered=True)
    return table.sort_values(["model", "system", "seed", "run"], ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    models = list(dict.fromkeys(table["model"]))
    columns = min(len(models), MOST_COLUMNS)
    rows = -(-len(models) // columns)
    most_bars = table.groupby("model")["system"].nunique().max()
    width = max(LEAST_PANEL, BAR * most_bars)
    figure, axes = plt.subplots(
        rows, columns, figsize=(1.2 + width * columns, 3.0 * rows), squeeze=False, layout="constrained"
    )
    for empty in axes.flat[len(models) :]:
        empty.axis("off")
    for axis, model in zip(axes.flat, models, strict=False):
        of_model = table[table["model"] == model]
        systems = [name for name in system_order(table["system"]) if (of_model["system"] == name).any()]
        for position, system in enumerate(systems):
            runs, style = of_model[of_model["system"] == system], system_style(system)
            policy, judge = runs["policy_tokens_per_s"].mean(), runs["judge_tokens_per_s"].mean()
            look = {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "width": 0.7}
            axis.bar(position, policy, **look)
            axis.bar(position, judge, bottom=policy, alpha=JUDGE_ALPHA, **look)
            axis.scatter(
                [position] * len(runs), runs["total_tokens_per_s"], s=14, color="black", zorder=3,
                marker=style.marker, linewidths=0,
            )  # fmt: skip
        axis.set_xticks(range(len(systems)), [_label(of_model, name) for name in systems], fontsize=7)
        gpus, steps = of_model["gpus"].iloc[0], of_model["steps"].iloc[0]
        axis.set_title(f"{model}\n{gpus} devices, {steps} steps", fontsize=8)
        axis.set_ylim(bottom=0)
    for first in axes[:, 0]:
        first.set_ylabel("generated tokens / s")
    parts = [Patch(color="#555555", label="policy"), Patch(color="#555555", alpha=JUDGE_ALPHA, label="judge")]
    axes[0][-1].legend(handles=parts, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _label(of_model: pd.DataFrame, system: str) -> str:
    """A bar's name, with its staleness bound and what was realised."""
    runs = of_model[of_model["system"] == system]
    bound, realised = int(runs["staleness_bound"].iloc[0]), float(runs["staleness_mean"].mean())
    return f"{system}\n{staleness_label(bound, realised).replace(', ', chr(10))}"

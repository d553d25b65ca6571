"""What every device did when: one panel a run, one row a device. White is idle."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.errors import UsageError
from harness.results.tables import Recorded, intervals_table
from paper_figures.side_by_side import staleness_label
from paper_figures.style import SHARE_COLOR

MOST = 10  # panels that a page holds


def data(runs: Sequence[Recorded]) -> pd.DataFrame:
    """A row an interval, of runs that may stand side by side."""
    if len(runs) > MOST:
        raise UsageError(f"a timeline shows at most {MOST} runs, not {len(runs)}; choose them with --run")
    tables = []
    for run in runs:
        table = intervals_table(run)
        summary = run.summary
        facts = {key: summary[key] for key in ("kind", "model", "system", "seed", "gpus", "staleness_bound")}
        facts |= {"staleness_mean": run.staleness, "makespan_s": summary["makespan_s"]}
        tables.append(table.assign(run=run.id, **facts))
    joined = pd.concat(tables, ignore_index=True)
    return joined[joined["start_s"] < joined["makespan_s"]].reset_index(drop=True)


def draw(table: pd.DataFrame) -> Figure:
    runs = list(dict.fromkeys(table["run"]))
    heights = [0.7 + 0.22 * min(12, table[table["run"] == run]["gpus"].iloc[0]) for run in runs]
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(7.0, sum(heights) + 0.4), squeeze=False, sharex=True, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, run in zip(axes[:, 0], runs, strict=True):
        of_run = table[table["run"] == run]
        for share, color in SHARE_COLOR.items():
            of_share = of_run[of_run["share"] == share]
            for device, spans in of_share.groupby("device"):
                bars = list(zip(spans["start_s"], spans["end_s"] - spans["start_s"], strict=True))
                axis.broken_barh(bars, (float(device) - 0.42, 0.84), color=color, linewidth=0)
        first = of_run.iloc[0]
        staleness = staleness_label(first["staleness_bound"], first["staleness_mean"])
        title = f"{first['system']} on {first['model']}, seed {first['seed']}, staleness: {staleness}"
        axis.set_title(title, fontsize=8, loc="left")
        axis.set_ylim(first["gpus"] - 0.5, -0.5)
        axis.set_xlim(0, table["makespan_s"].max())
        axis.set_ylabel("device")
        axis.axvline(first["makespan_s"], color="black", linewidth=0.8)
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[-1][0].set_xlabel("seconds")
    shown = [share for share in SHARE_COLOR if share != "idle"]
    handles = [Patch(color=SHARE_COLOR[share], label=share) for share in shown]
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper center", fontsize=7, frameon=False)
    return figure

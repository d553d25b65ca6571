"""Where the time of a shift goes: mean seconds by phase, for every way between roles, by system."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from harness.errors import UsageError
from harness.results.tables import Recorded, phases_table
from paper_figures.side_by_side import staleness_label
from paper_figures.style import PHASE_COLOR, system_order


def data(runs: Sequence[Recorded]) -> pd.DataFrame:
    """A row a phase, of runs that may stand side by side."""
    tables = []
    for run in runs:
        facts = {key: run.summary[key] for key in ("kind", "model", "system", "seed", "staleness_bound")}
        staleness = run.summary["realised_staleness"]["mean"]
        tables.append(phases_table(run).assign(run=run.id, staleness_mean=staleness, **facts))
    joined = pd.concat(tables, ignore_index=True)
    if joined.empty:
        raise UsageError("none of these runs has a shift that took devices from a role")
    return joined


def draw(table: pd.DataFrame) -> Figure:
    """Horizontal bars: a row is (model, system, source -> target) with its number of shifts."""
    table = table.assign(way=table["source"] + " → " + table["target"])
    order = [
        (model, system, way)
        for model in dict.fromkeys(table["model"])
        for system in system_order(table["system"])
        for way in sorted(set(table[(table["model"] == model) & (table["system"] == system)]["way"]))
    ]
    figure, axis = plt.subplots(figsize=(7.0, 1.2 + 0.24 * len(order)), layout="constrained")
    labels = []
    for row, (model, system, way) in enumerate(order):
        chosen = (table["model"] == model) & (table["system"] == system) & (table["way"] == way)
        shifts = table[chosen].groupby(["run", "shift"], observed=True).ngroups
        left = 0.0
        for phase, color in PHASE_COLOR.items():
            seconds = table[chosen & (table["phase"] == phase)]["seconds"].sum() / shifts
            axis.barh(row, seconds, left=left, color=color, height=0.75, label=phase if row == 0 else None)
            left += seconds
        bound, realised = table[chosen]["staleness_bound"].iloc[0], table[chosen]["staleness_mean"].mean()
        labels.append(f"{model} {system} ({staleness_label(bound, realised)}): {way} ({shifts})")
    axis.set_yticks(range(len(order)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("mean seconds of a shift, by phase\n(number of shifts in brackets)")
    figure.legend(ncols=len(PHASE_COLOR), loc="outside upper center", fontsize=7, frameon=False)
    return figure

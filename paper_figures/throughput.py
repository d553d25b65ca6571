"""Generated tokens a second, by model group and system: bars are means over seeds, points are runs."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.errors import UsageError
from harness.store import Recorded, throughput_table
from paper_figures.style import system_order, system_style

JUDGE_ALPHA = 0.45  # the judge's tokens are the pale part of a bar


def data(runs: Sequence[Recorded]) -> pd.DataFrame:
    """Refuses runs that are not comparable: other workloads under one name, or workers that share cores."""
    for run in runs:
        if run.summary["oversubscribed"]:
            raise UsageError(
                f"{run.id} is oversubscribed (more workers than cores) and is never compared; "
                "leave it out with --run"
            )
    first: dict[str, Recorded] = {}
    bounds: dict[tuple[str, str], int] = {}
    for run in runs:
        summary = run.summary
        bound = bounds.setdefault((summary["model"], summary["system"]), summary["staleness_bound"])
        if bound != summary["staleness_bound"]:
            raise UsageError(
                f"{summary['system']} on {summary['model']} was run with staleness bounds {bound} and "
                f"{summary['staleness_bound']}, which are not replicates; choose runs with --run"
            )
        same = first.setdefault(run.summary["model"], run)
        if run.workload != same.workload:
            differing = [key for key in run.workload if run.workload[key] != same.workload[key]]
            raise UsageError(
                f"{run.id} and {same.id} differ in {', '.join(differing)}, not only in who decides; "
                "choose runs with --run"
            )
    table = throughput_table(runs)
    table["system"] = pd.Categorical(table["system"], system_order(), ordered=True)
    return table.sort_values(["model", "system", "seed", "run"], ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    models = list(dict.fromkeys(table["model"]))
    figure, axes = plt.subplots(
        1, len(models), figsize=(1.2 + 2.2 * len(models), 2.8), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        of_model = table[table["model"] == model]
        systems = [name for name in system_order() if (of_model["system"] == name).any()]
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
        axis.set_xticks(range(len(systems)), systems, rotation=20, ha="right")
        gpus, steps = of_model["gpus"].iloc[0], of_model["steps"].iloc[0]
        axis.set_title(f"{model}\n{gpus} devices, {steps} steps", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("generated tokens / s")
    parts = [Patch(color="#555555", label="policy"), Patch(color="#555555", alpha=JUDGE_ALPHA, label="judge")]
    axes[0][-1].legend(handles=parts, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure

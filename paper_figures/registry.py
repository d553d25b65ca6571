"""All figures by name. A figure is a table made from runs, and a drawing made from the table alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from harness.results.tables import Recorded
from paper_figures import shift_breakdown, throughput, timeline


@dataclass(frozen=True)
class FigureKind:
    """`data` may refuse runs with a `UsageError`."""

    what: str
    data: Callable[[Sequence[Recorded]], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]


FIGURES = {
    "throughput": FigureKind("tokens a second by system", throughput.data, throughput.draw),
    "timeline": FigureKind("what every device did when", timeline.data, timeline.draw),
    "shift-breakdown": FigureKind(
        "where the time of a shift goes", shift_breakdown.data, shift_breakdown.draw
    ),
}

"""One request on many plausible machines: how far a result hangs on what is not known of the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SHOWN: dict[str, Callable[[dict[str, Any]], float]] = {
    "makespan_s": lambda summary: summary["makespan_s"],
    "tokens_per_s": lambda summary: summary["tokens_per_s"]["total"],
    "idle_share": lambda summary: summary["gpu_time_share"]["idle"],
}


def spread(nominal: dict[str, Any], drawn: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What came out on the nominal machine, and between which values 80 % of the drawn ones are."""
    found = {}
    for name, value in SHOWN.items():
        low, middle, high = np.quantile([value(summary) for summary in drawn], (0.1, 0.5, 0.9)).tolist()
        found[name] = {"nominal": value(nominal), "low": low, "median": middle, "high": high}
    return found


def render_spread(found: dict[str, dict[str, float]], machines: int, kind: str) -> str:
    """A row a number."""
    lines = ["", f"{f'on {machines} machines':<16}{'nominal':>12}{'median':>12}   80 % of them  ({kind})"]
    for name, row in found.items():
        digits = 3 if name.endswith("share") else 1
        lines.append(
            f"{name:<16}{row['nominal']:>12.{digits}f}{row['median']:>12.{digits}f}   "
            f"{row['low']:.{digits}f} to {row['high']:.{digits}f}"
        )
    return "\n".join(lines)

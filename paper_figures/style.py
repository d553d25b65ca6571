"""How figures look, and how they are written: the same data, the same bytes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from harness.results.summary import Share
from systems.machine.files import replace_file
from systems.types import Step

PALETTE = sns.color_palette("colorblind", 10).as_hex()


@dataclass(frozen=True)
class SystemStyle:
    """Colour, marker and hatch of one system, the same in all figures."""

    color: str
    marker: str
    hatch: str


MARKERS = ("o", "s", "D", "^", "v", "P", "*", "X", "<", ">")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo", "OO", "**")
STYLES = [SystemStyle(*look) for look in zip(PALETTE, MARKERS, HATCHES, strict=True)]
# What a device does, and the phases of a shift; text, because tables that are read from a file have no types.
SHARE_COLOR = dict(zip((share.value for share in Share), [*PALETTE[:4], "#ececec"], strict=True))
PHASE_COLOR = dict(
    zip(
        (step.value for step in Step),
        [PALETTE[7], PALETTE[4], PALETTE[5], PALETTE[0], PALETTE[1], PALETTE[2]],
        strict=True,
    )
)


def system_order(shown: Iterable[str] = ()) -> list[str]:
    """Systems as they are registered, and behind them those of `shown` that are not."""
    from systems.policies import SYSTEMS

    return [*SYSTEMS, *sorted(set(shown) - SYSTEMS.keys())]


def system_style(name: str) -> SystemStyle:
    """A system's own style; one that is not registered here is given what is left."""
    order = system_order()
    return STYLES[order.index(name) % len(STYLES) if name in order else -1]


def theme() -> None:
    sns.set_theme(context="paper", style="ticks", palette="colorblind")
    plt.rcParams.update(
        {
            "pdf.fonttype": 42,
            "ps.fonttype": 42,
            "font.family": "DejaVu Sans",
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.6,
        }
    )


def label_kind(figure: Figure, label: str) -> None:
    """What kind of numbers these are, and what else must be known, in a strip of its own at the bottom."""
    lines = textwrap.wrap(label, round(16 * figure.get_figwidth()))
    strip = 0.17 * len(lines) / figure.get_figheight()
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, strip, 1, 1 - strip))  # type: ignore[call-arg]
    figure.text(
        0.995, 0.005, "\n".join(lines), ha="right", va="bottom", fontsize=7, color="#444444", style="italic"
    )


def save(figure: Figure, data: pd.DataFrame, out: Path, name: str) -> list[Path]:
    """Write PDF, PNG and the CSV behind them, without dates or versions in them."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{ending}" for ending in ("pdf", "png", "csv")]
    plain: dict[str, Any] = {"CreationDate": None, "Creator": None, "Producer": None}
    pdf, png = io.BytesIO(), io.BytesIO()
    figure.savefig(pdf, format="pdf", metadata=plain)
    figure.savefig(png, format="png", metadata={"Software": None})
    csv = data.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    plt.close(figure)
    for path, content in zip(paths, (pdf.getvalue(), png.getvalue(), csv.encode()), strict=True):
        replace_file(path, content)
    return paths

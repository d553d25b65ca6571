"""`bench compare`: is one faster than the other?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.compare import FEW, METRICS, Contrast, compare, condition, select
from harness.errors import CheckFailed
from harness.record import RUNS
from harness.store import open_runs
from harness.suite import load_suite


@click.command("compare")
@click.argument("selections", nargs=-1, required=True, metavar="BASELINE OTHER...")
@click.option("--suite", help="Only runs of this suite's cells.")
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs with it; repeatable.")
@click.option("--metric", default="throughput", show_default=True, metavar="|".join(METRICS))
@click.option(
    "--allow", multiple=True, metavar="kind|workload|staleness|seeds", help="Compare in spite of it."
)
@click.option(
    "--fail-on", "conditions", multiple=True, metavar="METRIC<PERCENT%", help="Exit with 1 if it is so."
)
@click.option("--results", type=click.Path(path_type=Path), default=RUNS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="A JSON array on stdout, an object a comparison.")
def command(
    selections: tuple[str, ...], suite: str | None, where: tuple[str, ...], metric: str,
    allow: tuple[str, ...], conditions: tuple[str, ...], results: Path, as_json: bool,
) -> None:  # fmt: skip
    """Compare OTHER... with BASELINE, seed by seed.

    Each is a system, a run, or a selection such as 'system=pivot,staleness=0'. A ratio above 1 means that the
    other is faster; the verdict needs a bootstrap interval over runs and a rank test to agree.
    """
    checks = [condition(text) for text in conditions]
    runs = open_runs(results)
    if suite is not None:
        ids = {cell.id for cell in load_suite(suite).cells}
        runs = [run for run in runs if run.directory.manifest.get("cell") in ids]
    for text in where:
        runs = select(runs, text)
    found = compare(runs, selections, metric, frozenset(allow))
    click.echo(json.dumps([one.to_json() for one in found]) if as_json else render(found))
    broken = []
    for check in checks:
        against = (
            found if check.metric == metric else compare(runs, selections, check.metric, frozenset(allow))
        )
        broken += [f"{check.text}: {said(one)}" for one in against if check.holds(one)]
    if broken:
        raise CheckFailed("; ".join(broken))


def said(one: Contrast) -> str:
    return f"{one.contender.label} is {one.effect.ratio - 1:+.1%} in {one.metric} on {one.workload}"


def render(found: list[Contrast]) -> str:
    """A paragraph a workload and a line a contender."""
    lines: list[str] = []
    for one in found:
        effect = one.effect
        p = "-" if effect.p is None else f"{effect.p:.3g}"
        design = "pairs" if effect.paired else "independent runs"
        lines += [
            f"{one.workload}",
            f"  {one.contender.label} / {one.baseline.label}  {one.metric} ({one.kind})  "
            f"{effect.ratio:.3f} x  [{effect.low:.3f}, {effect.high:.3f}]  p {p}  {effect.n} {design}  "
            f"{effect.verdict}",
            f"  realised staleness {one.contender.staleness:.2f} / {one.baseline.staleness:.2f}",
        ]
        if one.points and len(one.points) < FEW:
            lines.append(
                "  by seed  " + "  ".join(f"{seed}: {ratio:.3f}" for seed, ratio in one.points.items())
            )
        lines += [f"  note: {note}" for note in one.notes]
    return "\n".join(lines)

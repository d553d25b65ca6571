"""`bench compare`: is one faster than the other?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from harness.cli import options
from harness.errors import CheckFailed, UsageError
from harness.results.comparable import ALLOWABLE
from harness.results.tables import Recorded, open_runs
from harness.studies.compare import FEW, METRICS, Contrast, compare_sides, condition, select
from harness.studies.stats import Effect, OverMachines
from harness.studies.suite import load_suite


@click.command("compare")
@click.argument("selections", nargs=-1, required=True, metavar="BASELINE OTHER...")
@click.option("--suite", help="Only runs of this suite's cells.")
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs with it; repeatable.")
@click.option("--metric", default="throughput", show_default=True, metavar="|".join(METRICS))
@click.option("--allow", multiple=True, metavar="|".join(ALLOWABLE), help="Compare in spite of it.")
@click.option(
    "--fail-on",
    "conditions",
    multiple=True,
    metavar="METRIC[.low|.high]<PERCENT%",
    help="Exit with 1 if it is so: of the point estimate, or of an end of the interval.",
)
@options.results
@options.as_json("A JSON array on stdout, an object a comparison.")
def command(
    selections: tuple[str, ...], suite: str | None, where: tuple[str, ...], metric: str,
    allow: tuple[str, ...], conditions: tuple[str, ...], results: Path, as_json: bool,
) -> None:  # fmt: skip
    """Compare OTHER... with BASELINE, seed by seed.

    Each is a system, a run, or a selection: key=value with commas between, such as staleness=0. Behind a
    folder and a colon ('old/runs:...') it is of the runs there. A ratio above 1 means that the other is
    faster; the verdict needs a bootstrap interval over runs and a rank test to agree.
    """
    checks = [condition(text) for text in conditions]
    options.note_unreadable(results)
    variants = {cell.id: cell.variant for cell in load_suite(suite).cells} if suite is not None else None

    def side(text: str) -> tuple[str, list[Recorded]]:
        folder, colon, rest = text.rpartition(":")
        runs = open_runs(Path(folder) if colon else results)
        if variants is not None:
            runs = [
                replace(run, variant=variants[run.directory.manifest["cell"]])
                for run in runs
                if run.directory.manifest.get("cell") in variants
            ]
            if not runs:
                raise UsageError(f"no complete run of a cell of '{suite}' in {folder or results}")
        for wanted in where:
            runs = select(runs, wanted)
        return text, select(runs, rest) if rest else runs

    sides = [side(text) for text in selections]
    found = compare_sides(sides, metric, frozenset(allow))
    click.echo(json.dumps([one.to_json() for one in found]) if as_json else render(found))
    broken: list[str] = []
    undecided: UsageError | None = None
    for check in checks:
        same = check.metric == metric
        against = found if same else compare_sides(sides, check.metric, frozenset(allow))
        for one in against:
            try:
                broken += [check.said(one)] if check.holds(one) else []
            except UsageError as error:
                undecided = undecided or error
    if broken:
        raise CheckFailed("; ".join(broken))
    if undecided:
        raise undecided


def interval(effect: Effect) -> str:
    return f"[{effect.low:.3f}, {effect.high:.3f}]" if effect.has_interval else "[no interval]"


def over(found: OverMachines) -> str:
    """How far a ratio holds over plausible machines, in words."""
    return (
        f"{found.machines} plausible ones: on {found.share:.0%} of them the ratio is on the same side of 1, "
        f"on 80 % it is {found.low:.3f} to {found.high:.3f}"
    )


def render(found: list[Contrast]) -> str:
    """A paragraph a workload and a line a contender."""
    lines: list[str] = []
    for one in found:
        effect = one.effect
        p = "-" if effect.p is None else f"{effect.p:.3g}"
        design = ("pair" if effect.n == 1 else "pairs") if effect.paired else "independent runs"
        lines += [
            f"{one.workload}",
            f"  {one.contender.label} / {one.baseline.label}  {one.metric} ({one.kind})  "
            f"{effect.ratio:.3f} x  {interval(effect)}  p {p}  {effect.n} {design}  "
            f"{effect.verdict}",
            f"  realised staleness {one.contender.staleness:.2f} / {one.baseline.staleness:.2f}",
        ]
        if one.machines is not None:
            lines.append(f"  machines  {over(one.machines)}")
        if one.points and len(one.by_seed) < FEW:
            lines.append(
                "  by seed  " + "  ".join(f"{seed}: {ratio:.3f}" for seed, ratio in one.by_seed.items())
            )
        lines += [f"  note: {note}" for note in one.notes]
    return "\n".join(lines)

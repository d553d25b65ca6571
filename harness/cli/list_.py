"""`bench list`: what there is to run, and what was run."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

from harness.errors import unknown
from harness.record import RUNS, list_runs

SUBJECTS = ("systems", "models", "workloads", "runs")


@click.command("list")
@click.argument("what", metavar="|".join(SUBJECTS))
@click.option("--results", type=click.Path(path_type=Path), default=RUNS, show_default=True)
def command(what: str, results: Path) -> None:
    """List systems, models, workloads or runs."""
    if what not in SUBJECTS:
        raise unknown("list", what, SUBJECTS)
    for line in {"systems": systems, "models": models, "workloads": workloads}.get(
        what, lambda: runs(results)
    )():
        click.echo(line)


def systems() -> list[str]:
    from systems.policies import ALIASES, SYSTEMS

    lines = []
    for name, policy in SYSTEMS.items():
        module = inspect.getdoc(sys.modules[policy.__module__]) or ""
        names = "".join(f" (alias {alias})" for alias, of in ALIASES.items() if of == name)
        first = module.splitlines()[0].partition(": ")[2]
        lines.append(f"{name:<16}{first}{names} Default staleness {policy.default_staleness}.")
    return lines


def models() -> list[str]:
    from workloads.groups import group_names, load_group

    lines = []
    for name in group_names():
        group = load_group(name)
        cluster = group.cluster
        split = f"{cluster.train}/{cluster.rollout}/{cluster.reward}"
        backend = "cosim" if group.real else "sim"
        lines.append(
            f"{name:<16}{group.description}; {cluster.gpus} GPUs (train/rollout/reward {split}); {backend}"
        )
    return lines


def workloads() -> list[str]:
    from workloads.groups import group_names, load_group

    lines = []
    for name in group_names():
        group = load_group(name)
        step = group.workload
        text = "hops, real text" if group.real else (
            f"responses: median {group.lengths.response_median:.0f}, cap {group.lengths.response_cap}; "
            f"judgement of 1k tokens {group.lengths.judge_at_1k:.0f}, cap {group.lengths.judge_cap}"
        )  # fmt: skip
        lines.append(
            f"{name:<16}{step.prompts} prompts x {step.samples} samples, {step.mini_batches} mini-batches, "
            f"{step.judge_calls} judge call(s); {text}"
        )
    return lines


def runs(results: Path) -> list[str]:
    found = list_runs(results)
    if not found:
        click.echo(f"no runs in {results}", err=True)
    return [f"{m['run']:<64}{m['status']:<12}{m['kind']}" for m in found]

"""`bench list`: what there is to run, and what was run."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import click

from harness.cli import options
from harness.errors import UsageError, unknown
from harness.results.record import RunDirectory, list_runs

SUBJECTS = ("systems", "planners", "models", "workloads", "suites", "runs")


@click.command("list")
@click.argument("what", metavar="|".join(SUBJECTS))
@click.option("--system", help="Runs: of this system.")
@click.option("--model", help="Runs: of this model group.")
@click.option("--kind", help="Runs: of this kind of numbers.")
@click.option("--status", help="Runs: that ended so.")
@click.option("--seed", type=int, help="Runs: of this seed.")
@click.option("--suite", help="Runs: of this suite's cells.")
@options.results
@options.as_json("Runs: one JSON array on stdout.")
def command(
    what: str, system: str | None, model: str | None, kind: str | None, status: str | None, seed: int | None,
    suite: str | None, results: Path, as_json: bool,
) -> None:  # fmt: skip
    """List systems, planners, models, workloads, suites or runs; runs by any of the filters together."""
    if what not in SUBJECTS:
        raise unknown("list", what, SUBJECTS)
    filters = {"system": system, "model": model, "kind": kind, "status": status, "seed": seed}
    given = {name: value for name, value in filters.items() if value is not None}
    if what != "runs":
        if unused := [*given, *(["suite"] if suite else []), *(["json"] if as_json else [])]:
            raise UsageError(f"--{unused[0]}: only for 'bench list runs'")
        for line in LISTS[what]():
            click.echo(line)
        return
    check_filters(given)
    options.note_unreadable(results)
    directories = [RunDirectory(results / manifest["run"], manifest) for manifest in list_runs(results)]
    found = [facts for facts in map(facts_of, directories) if given.items() <= facts.items()]
    if suite is not None:
        from harness.studies.suite import load_suite

        ids = {cell.id for cell in load_suite(suite).cells}
        found = [facts for facts in found if facts["cell"] in ids]
    if as_json:
        click.echo(json.dumps(found))
        return
    if not found:
        click.echo(f"no runs in {results}" + (" of these" if given or suite else ""), err=True)
    for facts in found:
        changed = " ".join(f"{key}={value}" for key, value in facts["settings"].items())
        click.echo(
            f"{facts['run']:<66} {facts['status']:<12}{facts['kind']:<12} {facts['steps']:>3} steps  "
            f"staleness {facts['staleness']}  {changed}".rstrip()
            + ("" if facts["verifiable"] else "  (unverified)")
        )


def check_filters(given: dict[str, Any]) -> None:
    """A filter that nothing can match is a mistake."""
    from harness.results.record import STATUSES
    from systems.policies import ALIASES, SYSTEMS
    from systems.types import Kind
    from workloads.groups import group_names

    if "system" in given:
        given["system"] = ALIASES.get(given["system"], given["system"])
    known = {"system": [*SYSTEMS], "model": group_names(), "kind": [kind.value for kind in Kind],
             "status": STATUSES}  # fmt: skip
    for name, values in known.items():
        if name in given and given[name] not in values:
            raise unknown(name, given[name], values)


def facts_of(run: RunDirectory) -> dict[str, Any]:
    """What a run is told by. It is `verifiable` if its seal has the digests of all of its files."""
    manifest, spec = run.manifest, run.manifest["spec"]
    return {
        **{key: manifest.get(key) for key in ("run", "kind", "started", "wall_s", "cell")},
        "status": run.status,
        "verifiable": run.unverified is None,
        "system": spec["system"],
        "model": spec["group"]["name"],
        "seed": spec["seed"],
        "steps": spec["steps"],
        "staleness": spec["staleness"],
        "settings": changed_settings(spec),
    }


def systems() -> list[str]:
    from systems.policies import ALIASES, SYSTEMS

    lines = []
    for name, policy in SYSTEMS.items():
        module = inspect.getdoc(sys.modules[policy.__module__]) or ""
        names = "".join(f" (alias {alias})" for alias, of in ALIASES.items() if of == name)
        first = module.splitlines()[0].partition(": ")[2]
        lines.append(f"{name:<16}{first}{names} Default staleness {policy.default_staleness}.")
    return lines


def planners() -> list[str]:
    from systems.policies.planners import DEFAULT_PLANNER, PLANNERS

    lines = []
    for name, planner in PLANNERS.items():
        first = (inspect.getdoc(sys.modules[planner.__module__]) or "").splitlines()[0]
        default = " Default." if name == DEFAULT_PLANNER else ""
        lines.append(f"{name:<16}{first}{default}")
    return lines


def models() -> list[str]:
    from harness.runs.backends import usual
    from workloads.groups import group_names, load_group

    lines = []
    for name in group_names():
        group = load_group(name)
        cluster = group.cluster
        split = f"{cluster.train}/{cluster.rollout}/{cluster.reward}"
        backend = usual(group).name
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


def changed_settings(spec: dict[str, Any]) -> dict[str, str]:
    """Where a run differs from its model group as it is shipped."""
    from harness.studies.compare import changes

    return changes(spec["group"])


def suites() -> list[str]:
    from harness.studies.suite import load_suite, suite_names

    return [
        f"{name:<16}{len(suite.cells)} cells; {suite.about}"
        for name, suite in ((name, load_suite(name)) for name in suite_names())
    ]


LISTS = {
    "systems": systems, "planners": planners, "models": models, "workloads": workloads, "suites": suites,
}  # fmt: skip

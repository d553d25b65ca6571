"""`bench plan`: what a run or a suite would ask for, before it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.cli import options
from harness.errors import UsageError
from harness.runs.assemble import assemble
from harness.runs.backends import SIM
from harness.runs.spec import resolve
from harness.studies.plan import plan, plan_suite
from harness.studies.suite import load_suite


@click.command("plan")
@click.argument("suite", required=False)
@click.option("--system", help="Of a single run.")
@click.option("--model", help="Of a single run.")
@click.option("--steps", type=int, help="RL steps: lengths may drift.  [default: 20]")
@click.option("--seed", type=int, help="[default: 0]")
@options.request
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Suite: cells at a time.")
@options.results
@options.as_json("One JSON object on stdout.")
def command(
    suite: str | None, system: str | None, model: str | None, steps: int | None, seed: int | None,
    request: dict[str, Any], results: Path, jobs: int, as_json: bool,
) -> None:  # fmt: skip
    """Show what a run or a suite would ask for, before it is run.

    For a simulated run it prints lengths by percentile and what fits in memory. For SUITE (a name or a TOML
    file) it prints the cells, which of them are done, what fits, and how long the rest will take.
    """
    if suite is not None:
        single = {"system": system, "model": model, "steps": steps, "seed": seed, **request}
        names = {
            "settings": "set",
            "configs": "policy-config or --judge-config",
            "trace_failed": "trace-failed",
        }
        if given := [names.get(name, name) for name, value in single.items() if value not in (None, (), {})]:
            raise UsageError(f"--{given[0]} is of a single run: give it or the suite '{suite}', not both")
        planned = plan_suite(load_suite(suite), results, jobs)
        click.echo(json.dumps(planned) if as_json else render_suite(planned))
        return
    if system is None or model is None:
        raise UsageError("give a suite, or --system and --model")
    spec = resolve(
        system=system, model=model, backend=SIM.name, steps=20 if steps is None else steps, seed=seed or 0,
        staleness=None, **request,
    )  # fmt: skip
    assemble(spec)  # refuses what does not fit, with the numbers
    found = plan(spec)
    click.echo(json.dumps(found) if as_json else render(found))


def render(found: dict[str, Any]) -> str:
    lines = [f"{'tokens':<22}{'p50':>8}{'p95':>8}{'p99':>8}{'mean':>8}{'at cap':>8}"]
    for row in found["lengths"]:
        numbers = "".join(f"{row[key]:>8.0f}" for key in ("p50", "p95", "p99", "mean"))
        lines.append(f"{row['what']:<22}{numbers}{row['at_cap']:>8.1%}")
    for role, facts in found["memory"].items():
        if "kv_tokens" in facts:
            lines.append(
                f"{role:<22}{facts['model']}: {facts['weights_gb']:.1f} GB of weights a device, "
                f"{facts['kv_tokens']} context tokens a replica, {facts['longest_sequences_at_once']} of the "
                f"longest sequences ({facts['longest_sequence_tokens']})"
            )
        else:
            lines.append(
                f"{role:<22}{facts['model']}: {facts['state_gb']:.0f} GB of state, at least "
                f"{facts['smallest_unit_devices']} devices"
            )
    return "\n".join(lines)


def render_suite(found: dict[str, Any]) -> str:
    lines = [f"{found['suite']}: {found['about']}"] if found["about"] else []
    lines.append(
        f"{'system':<16}{'model':<16}{'variant':<12}{'staleness':>9}{'cells':>7}{'done':>6}{'failed':>8}"
    )
    for row in found["rows"]:
        lines.append(
            f"{row['system']:<16}{row['model']:<16}{row['variant'] or '-':<12}{row['staleness']:>9}"
            f"{row['cells']:>7}{row['done']:>6}{row['failed']:>8}  {' '.join(row['settings'])}"
            f"{' on ' + str(row['machines']) + ' machines' if row['machines'] else ''}".rstrip()
        )
    for model, facts in found["memory"].items():
        lines.append(f"{model:<16}" + "; ".join(f"{role}: {text}" for role, text in facts.items()))
    left = (
        "unknown"
        if found["seconds"] is None
        else f"about {found['seconds'] / 60:.0f} min at --jobs {found['jobs']}"
    )
    other = f", {found['other_code']} of them done by other code" if found["other_code"] else ""
    lines.append(f"{found['cells']} cells, all of which fit; {found['to_do']} to run{other}: {left}")
    return "\n".join(lines)

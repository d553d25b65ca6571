"""`bench plan`: what a run would ask for, before it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.build import build
from harness.plan import plan
from harness.spec import resolve


@click.command("plan")
@click.option("--system", required=True)
@click.option("--model", required=True)
@click.option("--steps", type=int, default=20, show_default=True, help="RL steps: lengths may drift.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--gpus", type=int, help="Devices; the template split keeps its proportions.")
@click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Repeatable.")
@click.option("--policy-config", type=click.Path(path_type=Path), help="Another policy's config.json.")
@click.option("--judge-config", type=click.Path(path_type=Path), help="Another judge's config.json.")
@click.option("--trace", type=click.Path(path_type=Path), help="Response lengths from a file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    system: str, model: str, steps: int, seed: int, gpus: int | None, settings: tuple[str, ...],
    policy_config: Path | None, judge_config: Path | None, trace: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Lengths by percentile, and what fits in memory, of a simulated run."""
    configs = {"policy": policy_config, "judge": judge_config}
    spec = resolve(
        system=system, model=model, backend="sim", steps=steps, seed=seed, staleness=None, gpus=gpus,
        settings=settings, trace=trace,
        configs={which: path for which, path in configs.items() if path is not None},
    )  # fmt: skip
    build(spec)  # refuses what does not fit, with the numbers
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

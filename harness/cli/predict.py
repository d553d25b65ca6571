"""`bench predict`: one number of the simulator, with its band, without a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.fit.points import Predicted

ASKED = ("serving", "static", "kv_capacity", "rl_step", "kernel", "sync", "shift")


@click.command("predict")
@click.argument("kind", metavar="|".join(ASKED))
@click.option("--model", help="A known model, or a config.json (Hugging Face).")
@click.option("--device", default="h100", show_default=True, help="A device profile.")
@click.option("--engine", help="A version of the serving engine. Default: vllm-0.12.")
@click.option("--tp", type=int, help="Devices of a replica.")
@click.option("--concurrency", type=int, help="Requests at any time (serving).")
@click.option("--input-tokens", type=int, help="Of a request (serving).")
@click.option("--output-tokens", type=int, help="Of a request (serving).")
@click.option(
    "--with", "more", multiple=True, metavar="COLUMN=VALUE",
    help="Any other column of 'bench validate --rows' (docs/simulator.md).",
)  # fmt: skip
@options.as_json("A JSON array on stdout, an object a metric.")
def command(kind: str, more: tuple[str, ...], as_json: bool, **asked: str | int | None) -> None:
    """Predict a serving point, a static batch, a KV capacity, an RL step, a kernel, a synchronisation or a
    shift.

    Each number comes with the band in which 80 % of the plausible machines are.
    """
    from harness.fit.points import predict

    row = {name: str(value) for name, value in asked.items() if value is not None}
    for text in more:
        column, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--with {text}: expected COLUMN=VALUE")
        row[column] = value
    found = predict({"kind": kind, **row}, "predict")
    if as_json:
        click.echo(json.dumps([{**one.__dict__} for one in found]))
    else:
        click.echo(render(found))


def render(found: list[Predicted]) -> str:
    """A line a metric."""
    lines = [f"{'metric':<16}{'predicted':>14}   80 % of plausible machines  (simulated)"]
    lines += [f"{one.metric:<16}{one.value:>14.6g}   {one.low:.6g} to {one.high:.6g}" for one in found]
    return "\n".join(lines)

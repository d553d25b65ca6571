"""Options that verbs share, each declared once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from harness.results.record import RUNS, unreadable

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FILE = click.Path(path_type=Path)

results = click.option("--results", type=FILE, default=RUNS, show_default=True, help="Where runs are kept.")
quiet = click.option("--quiet", is_flag=True, help="No progress.")


def as_json(what: str) -> Decorator:
    """`--json`; `what` says what is printed."""
    return click.option("--json", "as_json", is_flag=True, help=what)


def out(default: str) -> Decorator:
    """`--out`, a folder that is written to."""
    return click.option(
        "--out", type=FILE, default=Path(default), show_default=True, help="Where it is written."
    )


_REQUEST = (
    click.option("--gpus", type=int, help="Devices; the template split keeps its proportions."),
    click.option(
        "--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Change one setting; repeatable."
    ),
    click.option(
        "--split", metavar="T/R/W|auto", help="The static split: devices that train, roll out and reward."
    ),
    click.option("--planner", help="Who says which split pivot should have; see 'bench list planners'."),
    click.option("--policy-config", type=FILE, help="Another policy's config.json (Hugging Face)."),
    click.option("--judge-config", type=FILE, help="Another judge's config.json."),
    click.option("--trace", type=FILE, help="Lengths from a file: CSV, JSON, JSONL or Parquet."),
    click.option(
        "--trace-failed",
        metavar="drop|refuse",
        help="Requests of a trace that failed, or have no response. Default: drop.",
    ),
)


def request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that change what is run; the command gets them as `request`, arguments of `resolve`."""

    @wraps(command)
    def folded(
        *args: Any, gpus: int | None, split: str | None, planner: str | None, settings: tuple[str, ...],
        policy_config: Path | None, judge_config: Path | None, trace: Path | None, trace_failed: str | None,
        **others: Any,
    ) -> Any:  # fmt: skip
        given = {"policy": policy_config, "judge": judge_config}
        configs = {which: path for which, path in given.items() if path is not None}
        asked = {
            "gpus": gpus, "split": split, "planner": planner, "settings": settings, "trace": trace,
            "trace_failed": trace_failed, "configs": configs,
        }  # fmt: skip
        return command(*args, request=asked, **others)

    for option in reversed(_REQUEST):
        folded = option(folded)
    return folded


def note_unreadable(root: Path) -> None:
    """Say on stderr which folders are left out because nobody can read what they are."""
    for line in unreadable(root):
        click.echo(f"note: {line}", err=True)

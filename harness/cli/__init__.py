"""`bench`: one file a verb. This file loads nothing but click, so that `bench --help` is instant."""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType
from typing import Any

import click

from harness import errors
from harness.cli import streams

VERBS = {
    "run": "Run one system on one model group and record it.",
    "sweep": "Run all cells of a suite.",
    "plan": "A run or a suite before it is run: lengths, memory, cells, time.",
    "list": "List systems, models, workloads, suites or runs.",
    "show": "Show the summary of a run.",
    "compare": "Is one system faster than another, seed by seed?",
    "claims": "The paper's claims beside what came out here.",
    "export": "A run as tables or as a Perfetto trace.",
    "figures": "Draw figures from recorded runs.",
    "replay": "A recorded run again: its decisions, and its times in the simulator.",
    "calibrate": "Measure what the tiny models cost on this machine's live workers.",
    "fit": "The simulator's coefficients from public measurements.",
    "predict": "One number of the simulator, with its band, without a run.",
    "validate": "The simulator against public measurements.",
}


# A path that was given is not what it should be; anything else of the system's is not the user's mistake.
ON_PATHS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class _Lazy(click.Group):
    """Knows every verb's name and first line; imports a verb when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"harness.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview, without importing a single verb."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            raise click.UsageError(str(errors.unknown("command", args[0], VERBS)))
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pivot-bench", prog_name="bench")
def cli() -> None:
    """How should GPUs move between rollout, generative reward and training while an RL job runs?

    Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 a check failed, 2 usage,
    3 environment unfit, 4 some cells failed, 5 measurement invalid, 130 interrupted.
    """


ENDING = (signal.SIGTERM, signal.SIGHUP)  # signals that end a command as Ctrl-C does


def end_as_if_interrupted(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does now: an event loop that runs has a handler of its own, which ends it in order."""
    interrupt = signal.getsignal(signal.SIGINT)
    if callable(interrupt):
        interrupt(signal.SIGINT, frame)
    else:  # it is ignored, as in a job that a script started in the background
        raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: every error that a user can act on is one line and an exit code."""
    streams.last()
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores one, and that is the user's word
            signal.signal(number, end_as_if_interrupted)
    try:
        cli.main(args=arguments, prog_name="bench", standalone_mode=False)
    except errors.BenchError as error:
        click.echo(f"bench: {error}", err=True)
        sys.exit(error.code)
    except click.ClickException as error:
        click.echo(f"bench: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"bench: {error.filename or ''}: {error.strerror or error}", err=True)
        sys.exit(errors.USAGE if isinstance(error, ON_PATHS) else errors.UNFIT)
    except (click.Abort, KeyboardInterrupt):
        for number in (signal.SIGINT, *ENDING):
            signal.signal(number, signal.SIG_IGN)  # it is ending already
        click.echo("bench: interrupted; what was logged is kept", err=True)
        sys.exit(errors.INTERRUPTED)

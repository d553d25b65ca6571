"""`bench sweep`: every run of a suite."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType

import click
import rich.console
import rich.progress

from harness.cli import cell, options
from harness.errors import CellsFailed, UsageError, unknown
from harness.results.wandb import MODES, chosen_mode
from harness.studies.suite import Cell, load_suite
from harness.studies.sweep import Forecast, Outcome, alone_in, interleaved, ledger, seal_left, sweep
from systems.machine import processes
from systems.types import Kind


@click.command("sweep")
@click.argument("suite")
@click.option("--resume", is_flag=True, help="Keep the cells that are done, run the rest.")
@click.option("--retry", metavar="failed", help="With --resume: also run cells again that failed.")
@click.option("--any-code", is_flag=True, help="With --resume: keep cells that other code has run, too.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Cells at a time.")
@click.option("--fail-fast", is_flag=True, help="Start nothing more after a failure.")
@click.option("--wandb", "wandb_mode", metavar="|".join(MODES), default="disabled", show_default=True)
@options.results
@options.as_json("A JSON array on stdout, an object a cell.")
@options.quiet
def command(
    suite: str, resume: bool, retry: str | None, any_code: bool, jobs: int, fail_fast: bool, wandb_mode: str,
    results: Path, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run all cells of SUITE, a name of 'bench list suites' or a TOML file.

    Cells run in random order, systems of one comparison next to each other. A failure does not stop the
    others; the exit code is then 4. Ctrl-C loses only what is under way.
    """
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least 1")
    if retry not in (None, "failed"):
        raise unknown("--retry", str(retry), ["failed"])
    if not resume and (retry or any_code):
        raise UsageError(f"--{'retry' if retry else 'any-code'}: only with --resume")
    mode = chosen_mode(wandb_mode)
    chosen = load_suite(suite)
    if jobs > 1 and any(cell.spec.kind is Kind.MEASURED for cell in chosen.cells):
        raise UsageError(
            f"--jobs {jobs}: runs of this suite are measured and would disturb each other; --jobs 1"
        )
    with alone_in(results) as lock:
        found = ledger(chosen, results, any_code)
        if (found.done or found.failed) and not resume:
            raise UsageError(
                f"{len(found.done)} of {len(chosen.cells)} cells are in {results} already"
                + (f", and {len(found.failed)} failed" if found.failed else "")
                + ": --resume keeps them"
                + (" (--retry failed tries those again)" if found.failed else "")
                + ", another --results runs them again"
            )
        seal_left(found, results)
        cells = interleaved(found.to_do(chosen.cells, bool(retry)), chosen.sha256)
        earlier = [cell for cell in chosen.cells if cell.id in found.failed and cell not in cells]
        with Display(cells, Forecast(results), jobs, quiet) as display:
            if found.other_code:
                display.say(f"{len(found.other_code)} cells were run by other code and are run again")
            try:
                program = processes.command(cell.__name__)
                outcomes = sweep(
                    cells, results, lock, program, jobs=jobs, fail_fast=fail_fast, wandb=mode,
                    ended=display.ended,
                )  # fmt: skip
            except KeyboardInterrupt:
                display.say(f"{display.done} of {len(cells)} cells ended; the same with --resume goes on")
                raise
    outcomes += [
        Outcome(c, "complete", found.done[c.id]["run"], "kept") for c in chosen.cells if c.id in found.done
    ]
    outcomes += [
        Outcome(c, "failed", found.failed[c.id]["run"], found.failed[c.id].get("reason", "") + " (earlier)")
        for c in earlier
    ]
    report(outcomes, len(chosen.cells), as_json)


def report(outcomes: list[Outcome], cells: int, as_json: bool) -> None:
    """What came of it; raises `CellsFailed` if something failed or was not started."""
    failed = [one for one in outcomes if one.status != "complete"]
    kept = sum(one.why == "kept" for one in outcomes)
    ran, missing = len(outcomes) - len(failed) - kept, cells - len(outcomes)
    if as_json:
        rows = [
            {
                "cell": one.cell.id,
                "label": one.cell.label,
                "status": one.status,
                "run": one.run,
                "why": one.why,
            }
            for one in outcomes
        ]
        click.echo(json.dumps(rows))
    else:
        left = f", {missing} not started" if missing else ""
        click.echo(f"{cells} cells: {ran} run, {kept} kept, {len(failed)} failed{left}")
        for one in failed:
            click.echo(f"failed  {one.cell.label:<60}  {one.why}" + (f"  ({one.run})" if one.run else ""))
    if failed or missing:
        raise CellsFailed(
            f"{len(failed)} of {cells} cells failed" + (f", {missing} not started" if missing else "")
        )


class Display:
    """One bar for all cells, with the time that is left; lines where stderr is no terminal."""

    def __init__(self, cells: list[Cell], forecast: Forecast, jobs: int, quiet: bool) -> None:
        self._quiet, self._jobs = quiet, jobs
        expected = {cell.id: forecast.wall_s(cell.spec) for cell in cells}
        self._known = all(seconds is not None for seconds in expected.values())
        self._expected = {cell: seconds or 0.0 for cell, seconds in expected.items()}
        self._total, self.done, self._expected_done = len(cells), 0, 0.0
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(), rich.progress.TextColumn("{task.fields[left]}"),
            console=self._console, transient=True, disable=quiet or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("cells", total=len(cells), left=self._left())
        self._began = time.perf_counter()

    def __enter__(self) -> Display:
        if not self._quiet:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def ended(self, outcome: Outcome) -> None:
        self.done += 1
        self._expected_done += self._expected[outcome.cell.id]
        self.say(
            f"{self.done:>4}/{self._total}  {outcome.status:<9} {outcome.cell.label}"
            + (f": {outcome.why}" if outcome.why else "")
            + f"  ({self._left()})"
        )
        self._bar.update(self._task, advance=1, left=self._left())

    def _left(self) -> str:
        """From what was expected of the cells that are left, and how wrong that was so far."""
        if not self._known:
            return "time left unknown"
        left = sum(self._expected.values()) - self._expected_done
        if not self.done:
            return f"about {_span(left / self._jobs)} left"
        taken = time.perf_counter() - self._began
        return f"about {_span(left * taken / self._expected_done if self._expected_done else 0.0)} left"

    def say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

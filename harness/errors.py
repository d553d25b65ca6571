"""Errors that end a command with one line and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OK, CHECK_FAILED, USAGE, UNFIT, CELLS_FAILED, INVALID, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


MOST_LISTED = 20  # names in a message


class BenchError(Exception):
    """One clear line for the user, and the exit code."""

    code = USAGE


class UsageError(BenchError):
    """The request cannot be met as it stands: nothing was started."""


class UnfitError(BenchError):
    """This machine or installation lacks something."""

    code = UNFIT


class CheckFailed(BenchError):
    """A check that the user asked for did not hold."""

    code = CHECK_FAILED


class CellsFailed(BenchError):
    """Some runs of a sweep failed; the others are there."""

    code = CELLS_FAILED


class InvalidRun(BenchError):
    """A run ended with a number that cannot be: it counts for nothing."""

    code = INVALID


def unknown(what: str, given: str, known: Iterable[str]) -> UsageError:
    """ "unknown fruit 'aple'; did you mean 'apple'?", or the whole list where nothing is near."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    listed = ", ".join(names[:MOST_LISTED]) + (" and others" if len(names) > MOST_LISTED else "")
    hint = f"did you mean '{near[0]}'?" if near else f"known: {listed}"
    return UsageError(f"unknown {what} '{given}'; {hint}")

"""The event log of a run: one JSON object a line, in the order in which things happened.

Invariants
* What `sha256` says is what was written: a write is complete, or raises `OSError` with the path.
* Whoever reads a log gets events, or one line that names the file and the line which is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from harness.errors import BenchError, InvalidRun
from systems.events import Event, VersionPublished, decode, encode
from systems.machine.files import write_all

EVENTS = "events.jsonl"
LINES_TOGETHER = 4096  # events written at once, where no RL step ends before
# What reading a log raises where an event is missing, is cut, or does not follow from those before it.
DOES_NOT_FOLLOW = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class EventLog:
    """Appends events to `events.jsonl`, hashes them, and shows each to an observer."""

    def __init__(self, path: Path, observer: Callable[[Event], None]) -> None:
        self.path = path
        self._observe = observer
        self._file = path.open("wb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # held while the run lives, see `record.status_of`
        self._sha = hashlib.sha256()
        self._lines: list[bytes] = []  # not written yet
        self._broken = False  # a write did not end: what follows would stand behind a hole

    def emit(self, event: Event) -> None:
        line = orjson.dumps(encode(event), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        self._lines.append(line)
        self._observe(event)
        if isinstance(event, VersionPublished) or len(self._lines) >= LINES_TOGETHER:
            self._write()

    def _write(self) -> None:
        if self._broken:
            return
        data, self._lines = b"".join(self._lines), []
        self._broken = True  # until all of it is written, whatever interrupts that
        write_all(self._file, data, self.path)
        self._sha.update(data)
        self._broken = False

    @property
    def broken(self) -> bool:
        """Is there a hole, or half a line, at its end?"""
        return self._broken

    @property
    def sha256(self) -> str:
        """The digest of what was written so far."""
        return self._sha.hexdigest()

    def close(self) -> None:
        """Write what is left. Raises `OSError`; the file is closed all the same."""
        if self._file.closed:
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            with contextlib.suppress(OSError):
                self._file.close()


class Told:
    """An event sink that only tells an observer: for runs of which nothing is recorded."""

    def __init__(self, observer: Callable[[Event], None]) -> None:
        self._observe = observer

    def emit(self, event: Event) -> None:
        self._observe(event)


@contextmanager
def reading(path: Path) -> Iterator[Iterator[Event]]:
    """The events of a log, for the block that uses them.

    A line that is no event, and an event that does not follow from those before it (which the block notices,
    because something is missing) are one `InvalidRun` that names the line. A last line without its end was
    cut off by a crash and is left out.
    """
    line = 0

    def events() -> Iterator[Event]:
        nonlocal line
        with path.open("rb") as file:
            for text in file:
                line += 1
                if text.endswith(b"\n"):
                    raw = orjson.loads(text)
                    if not isinstance(raw, dict):
                        raise ValueError("not an event")
                    yield decode(raw)

    try:
        yield events()
    except (BenchError, OSError):
        raise
    except DOES_NOT_FOLLOW as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidRun(f"{path}:{line}: the log has a hole here, or before ({why})") from error

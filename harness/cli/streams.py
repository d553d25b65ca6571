"""Standard streams that cannot end a command: whoever reads them may go away at any moment.

| stream | a reader that is gone means                      | what else can go wrong                      |
|--------|--------------------------------------------------|---------------------------------------------|
| stdout | nobody wants the rest: it goes nowhere           | a full disk is an error: data would be lost |
| stderr | nobody looks any more: what is said goes nowhere | nothing: reporting ends no measurement      |

The exit code says how the command ended, not who read it.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import BinaryIO, TextIO

GONE = (errno.EPIPE, errno.ECONNRESET)  # a reader that is not there any more


def _as_it_came(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of a path go out as they came in; what a stream cannot say is spelled out."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error("as-it-came", _as_it_came)


class Lasting(io.TextIOWrapper):
    """A standard stream that goes on into nothing once nobody can be reached through it.

    `forgives` is what is not an error of the command: error numbers, or None for all of them.
    """

    def __init__(self, stream: BinaryIO, usual: TextIO, forgives: tuple[int, ...] | None) -> None:
        # A path may hold bytes that are not UTF-8; it is written as it came, never refused.
        # ASCII is what a locale says that nobody has set: then, as click does, UTF-8.
        encoding = "utf-8" if codecs.lookup(usual.encoding).name == "ascii" else usual.encoding
        super().__init__(
            stream, encoding=encoding, errors="as-it-came", newline="\n",
            line_buffering=usual.isatty() or forgives is None,
        )  # fmt: skip
        self._forgives = forgives

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """From now on it leads nowhere, also for what is buffered and for what other code writes there."""
        if self._forgives is not None and error.errno not in self._forgives:
            raise error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)


def last() -> None:
    """Make this process's standard streams lasting ones."""
    _open_all()
    if sys.stdout is not None and not isinstance(sys.stdout, Lasting):
        sys.stdout.flush()
        sys.stdout = Lasting(sys.stdout.buffer, sys.stdout, GONE)
    if sys.stderr is not None and not isinstance(sys.stderr, Lasting):
        sys.stderr.flush()
        sys.stderr = Lasting(sys.stderr.buffer, sys.stderr, None)


def _open_all() -> None:
    """A standard descriptor that is closed would be given to the next file that is opened, such as a run's
    log, and whatever a library prints would be written there."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)
    os.close(lowest)

"""Writing files and knowing that they were written.

Invariants
* A write is complete or an `OSError` that names the path: a raw file may take a part of what it is given,
  and the rest is offered again until the system refuses it.
* A file that is replaced is whole: the new one, or the old one where the new one could not be written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path
from typing import Protocol


class Writable(Protocol):
    """What `write_all` needs of a raw file: how many bytes were taken, or None if none could be."""

    def write(self, data: memoryview, /) -> int | None: ...


def write_all(file: Writable, data: bytes, path: Path) -> None:
    """Write all of `data`. Raises `OSError` naming `path` if the system takes only a part of it."""
    left = memoryview(data)
    while left:
        try:
            taken = file.write(left)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        if not taken:
            raise OSError(errno.EIO, "takes no more data", str(path))
        left = left[taken:]


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file or leave the old one. Raises `OSError` naming `path`."""
    data = content.encode() if isinstance(content, str) else content
    fresh = path.with_name(path.name + ".tmp")
    try:
        with fresh.open("wb", buffering=0) as file:
            write_all(file, data, path)
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def file_sha256(path: Path) -> str:
    """The digest of what is on the disk now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

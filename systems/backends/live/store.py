"""The parameter store: named tensors in shared memory, written once and mapped by every reader.

A segment is anonymous memory behind a file descriptor. Workers are sent the descriptor and map it, so
nothing is copied, and nothing is left behind whatever dies: the kernel frees memory that nobody has open.

Invariants
* A version is written before it is put, and never changed after that.
* The newest version of a name is kept; an older one is freed when its last reader is gone. Freed memory
  is used again for the next version of its size, because fresh pages cost several times their copying.
* Only the control process decides; workers hold what they were given until they are told otherwise or die.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

ALIGN = 16  # floats; a tensor starts on a cache line
SPARE = 2  # freed segments of one size that are kept for the next versions

Layout = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes, in order


def layout_of(state: Mapping[str, Tensor]) -> Layout:
    """Raises `ValueError` for anything but fp32."""
    for name, tensor in state.items():
        if tensor.dtype is not torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; the store keeps fp32")
    return tuple((name, tuple(tensor.shape)) for name, tensor in state.items())


def layout_from_json(raw: Iterable[tuple[str, Iterable[int]]]) -> Layout:
    return tuple((name, tuple(shape)) for name, shape in raw)


def floats(layout: Layout) -> int:
    """Length of a segment for `layout`, in fp32 values."""
    return sum(_span(shape) for _, shape in layout)


def _span(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // ALIGN) * ALIGN


@dataclass(eq=False)
class Segment:
    """Shared memory of `length` fp32 values behind descriptor `fd`; `number` names it between processes."""

    number: int
    fd: int
    length: int
    _flat: Tensor | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        return self.length * 4

    def flat(self) -> Tensor:
        """All of it as fp32 [length]; mapped at the first call."""
        if self._flat is None:
            self._flat = torch.frombuffer(mmap.mmap(self.fd, self.bytes), dtype=torch.float32)
        return self._flat

    def view(self, layout: Layout) -> dict[str, Tensor]:
        """Its tensors, without a copy."""
        flat, start, found = self.flat(), 0, {}
        for name, shape in layout:
            found[name] = flat[start : start + prod(shape)].view(shape)
            start += _span(shape)
        return found

    def write(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in, in its order."""
        for name, target in self.view(layout_of(state)).items():
            target.copy_(state[name])

    def close(self) -> None:
        """Give the descriptor up; mappings live on until nobody refers to them."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._flat = -1, None


def allocate(number: int, length: int) -> Segment:
    """Fresh anonymous shared memory."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"parameters-{number}", os.MFD_CLOEXEC)
    else:  # elsewhere an unlinked file does the same
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, length * 4)
    return Segment(number, fd, length)


@dataclass(eq=False)
class _Version:
    segment: Segment
    layout: Layout
    readers: set[int] = field(default_factory=set)


class ParameterStore:
    """Owned by the control process."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, _Version]] = {}  # name -> version -> memory, oldest first
        self._spare: list[Segment] = []
        self._made: list[Segment] = []

    def blank(self, length: int) -> Segment:
        """Memory of `length` fp32 values to be written: a freed segment, or a new one."""
        for segment in self._spare:
            if segment.length == length:
                self._spare.remove(segment)
                return segment
        segment = allocate(1 + len(self._made), length)
        self._made.append(segment)
        return segment

    def give_back(self, segment: Segment) -> None:
        """Memory that nobody reads any more."""
        alike = [other for other in self._spare if other.length == segment.length]
        if len(alike) < SPARE:
            self._spare.append(segment)
        else:
            segment.close()

    def put(self, name: str, version: int, segment: Segment, layout: Layout) -> None:
        """`segment` is now the newest version of `name`."""
        self._versions.setdefault(name, {})[version] = _Version(segment, layout)
        self._sweep(name)

    def store(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Write `state` here, in this process, and put it."""
        layout = layout_of(state)
        segment = self.blank(floats(layout))
        segment.write(state)
        self.put(name, version, segment, layout)

    def newest(self, name: str) -> int:
        return max(self._versions[name])

    def versions(self, name: str) -> list[int]:
        """What is kept, oldest first."""
        return sorted(self._versions[name])

    def acquire(self, name: str, version: int, reader: int) -> Segment:
        """Version `version` of `name`, kept until `reader` releases it."""
        found = self._versions[name][version]
        found.readers.add(reader)
        return found.segment

    def layout(self, name: str) -> Layout:
        return self._versions[name][self.newest(name)].layout

    def release(self, reader: int, name: str | None = None, but: int | None = None) -> None:
        """`reader` holds nothing any more: of `name` or of all names, `but` for one version."""
        for known in [name] if name is not None else list(self._versions):
            for version, entry in self._versions[known].items():
                if version != but:
                    entry.readers.discard(reader)
            self._sweep(known)

    def state(self, name: str) -> dict[str, Tensor]:
        """The newest version's tensors, mapped here."""
        entry = self._versions[name][self.newest(name)]
        return entry.segment.view(entry.layout)

    def _sweep(self, name: str) -> None:
        entries = self._versions[name]
        newest = max(entries)
        for version in [v for v, entry in entries.items() if v != newest and not entry.readers]:
            self.give_back(entries.pop(version).segment)

    def close(self) -> None:
        for segment in self._made:
            segment.close()
        self._spare, self._versions = [], {}

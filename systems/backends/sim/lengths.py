"""The one thing that a simulated replica must know about a sequence: when it ends.

A `LengthSource` answers that from a distribution, from a trace, or from a real engine that generates
the text at that policy version (`backends/cosim`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from systems.backends.base import Work
from systems.types import End


class LengthSource(Protocol):
    """Continuations of sequences under a policy version."""

    def announce(self, work: Work, version: int) -> None:
        """This sequence will soon be begun: a source may prepare it together with others."""
        ...

    def remaining(self, work: Work, version: int) -> int:
        """Tokens from `work.length` to the sequence's end, under this version; at least 1."""
        ...

    def tokens(self, work: Work, version: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The first `count` tokens of that continuation and their log-probabilities, if they are real."""
        ...

    def end(self, work: Work, version: int) -> End | None:
        """Why that continuation ends; None where text is not real."""
        ...

    def forget(self, sequences: Collection[int]) -> None:
        """These sequences have ended or will be asked for anew."""
        ...


class DrawnLengths:
    """Lengths that a workload has drawn beforehand: the same for every system, whatever the placement."""

    def __init__(self, total: LengthTable) -> None:
        self._total = total

    def announce(self, work: Work, version: int) -> None:
        pass

    def remaining(self, work: Work, version: int) -> int:
        return max(1, self._total.total_tokens(work) - work.length)

    def tokens(self, work: Work, version: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return (), ()

    def end(self, work: Work, version: int) -> End | None:
        return None

    def forget(self, sequences: Collection[int]) -> None:
        pass


class LengthTable(Protocol):
    """A workload's lengths: how many tokens a sequence will have generated when it ends."""

    def total_tokens(self, work: Work) -> int: ...

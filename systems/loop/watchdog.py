"""Ends a run in which nothing gets done any more, even if the policy keeps asking to be woken.

What counts as getting done: a sequence that ends, a micro-batch or an optimizer step that is trained, a
version that is published. Shifts do not count: a policy can shift for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from systems.loop.clock import now_ns, to_ns
from systems.types import NS_PER_S


class Stalled(RuntimeError):
    """Nothing got done for longer than anything can take."""


class Watchdog:
    """`feed` it whenever something got done; it barks when that was too long ago."""

    def __init__(self) -> None:
        self._fed_ns = 0

    def feed(self) -> None:
        self._fed_ns = now_ns()

    async def watch(self, patience_s: Callable[[], float], describe: Callable[[], str]) -> None:
        """Raises `Stalled`, with the state in one line, once `patience_s` have passed without anything."""
        self.feed()
        while True:
            patience = patience_s()
            left_ns = to_ns(patience) - (now_ns() - self._fed_ns)  # whole: a rest of a part is no time
            if left_ns <= 0:
                raise Stalled(f"nothing has got done for {patience:.0f} s: {describe()}")
            await asyncio.sleep(left_ns / NS_PER_S)

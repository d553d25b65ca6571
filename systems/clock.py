"""Virtual time: an asyncio loop whose clock jumps to the next timer instead of waiting for it.

Invariants
* Time is a whole number of nanoseconds; timers that are due together run in the order they were set.
* Only what runs on the loop moves time: threads, file descriptors and executors are refused, because
  they would make a run depend on the machine.
* When nothing is scheduled and nothing is ready, no progress is possible: that is `NothingScheduled`,
  where a real loop would hang.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar

NS_PER_S = 1_000_000_000
T = TypeVar("T")


class NothingScheduled(RuntimeError):
    """Every task waits for something that no timer and no ready task will bring."""


def now_ns() -> int:
    """The running loop's time, virtual or real, in nanoseconds."""
    return round(asyncio.get_running_loop().time() * NS_PER_S)


async def sleep_ns(duration_ns: int) -> None:
    await asyncio.sleep(duration_ns / NS_PER_S)


def to_ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class _Timer(asyncio.TimerHandle):
    """A timer that is ordered by (nanosecond, order of creation)."""

    __slots__ = ("_order",)

    def __init__(
        self, when: float, order: int, callback: Callable[..., object], args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop, context: Context | None,
    ) -> None:  # fmt: skip
        super().__init__(when, callback, args, loop, context)
        self._order = order

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self._when, self._order) < (other._when, other._order)


class _Selector(selectors.BaseSelector):
    """Never waits: a wait for the next timer becomes a jump of the loop's clock."""

    def __init__(self) -> None:
        self.loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingScheduled("nothing is scheduled: every task waits for another")
        if timeout > 0:
            self.loop.jump()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)  # the loop's own wake-up pipe

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def close(self) -> None:
        pass


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A `SelectorEventLoop` in virtual time, starting at 0."""

    _scheduled: list[_Timer]

    def __init__(self) -> None:
        selector = _Selector()
        self._now_ns = 0
        self._order = itertools.count()
        self._home = threading.get_ident()
        super().__init__(selector)
        selector.loop = self
        # Timers due at this very nanosecond run now, those a nanosecond later do not.
        self._clock_resolution = 0.5 / NS_PER_S

    def time(self) -> float:
        return self._now_ns / NS_PER_S

    def jump(self) -> None:
        """Move the clock to the earliest timer."""
        self._now_ns = max(self._now_ns, round(self._scheduled[0].when() * NS_PER_S))

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        exact = round(when * NS_PER_S) / NS_PER_S
        timer = _Timer(exact, next(self._order), callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_in_executor(self, *_: Any) -> NoReturn:
        raise RuntimeError("virtual time has no executors: a thread would make the run irreproducible")

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._home:
            raise RuntimeError("virtual time takes no calls from other threads")
        return self.call_soon(callback, *args, context=context)  # a signal handler of this very thread

    def add_reader(self, *_: Any) -> NoReturn:
        raise RuntimeError("virtual time waits for no file descriptors")

    def add_writer(self, *_: Any) -> NoReturn:
        raise RuntimeError("virtual time waits for no file descriptors")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

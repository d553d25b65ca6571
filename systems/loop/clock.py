"""The run's time: virtual, in a loop whose clock jumps to the next timer, or real, counted from its start.

Invariants of virtual time
* Time is a whole number of nanoseconds; timers that are due together run in the order they were set.
* Everything that is ready at a moment runs, with all that it makes ready, before the clock moves and
  before a timer of the same moment fires: a timer for "now" means "after what is happening now".
* Only what runs on the loop moves time: threads, file descriptors and executors are refused, because
  they would make a run depend on the machine.
* When nothing is ready and no timer is set, no progress is possible: that is `NothingScheduled`, where
  a real loop would hang.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar

from systems.types import NS_PER_S

CROWDED = 1024  # cancelled timers are swept out when more than these, and more than half, are dead
T = TypeVar("T")


class NothingScheduled(RuntimeError):
    """Every task waits for something that no timer and no ready task will bring."""


def now_ns() -> int:
    """The running loop's time, virtual or real, in nanoseconds."""
    if _virtual is not None:
        return _virtual.now_ns
    return round(asyncio.get_running_loop().time() * NS_PER_S)


def to_ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class _Strict(asyncio.BaseEventLoop):
    """An error in a callback ends the run; asyncio would print it and go on without its effect."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "handle" in context:
            raise error
        super().call_exception_handler(context)


class _Soon(asyncio.Handle):
    """asyncio's handle without a context and without what is kept for debugging."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._cancelled = False
        self._context = self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same for a timer, which is set when it is made."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self._callback, self._args, self._loop = callback, args, loop
        self._cancelled = False
        self._context = self._repr = self._source_traceback = None
        self._when, self._scheduled = when, True


class VirtualTimeLoop(_Strict):
    """An event loop in virtual time, starting at 0. It has no selector, because it never waits."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []  # heap by (ns, order set)
        self._set = 0  # timers ever set
        self._dead = 0  # cancelled timers that are still in the heap
        self._home = threading.get_ident()

    def time(self) -> float:
        return self.now_ns / NS_PER_S

    def run_forever(self) -> None:
        # Asking asyncio for the running loop costs a system call, and time is asked for constantly.
        global _virtual
        outer, _virtual = _virtual, self
        try:
            super().run_forever()
        finally:
            _virtual = outer

    def _run_once(self) -> None:
        """What `BaseEventLoop` calls over and over: run all that is ready, else move the clock."""
        ready = self._ready
        if not ready:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                # What `_run` does, without entering a context: nothing here has context variables, and an
                # error ends the run either way.
                handle._callback(*handle._args)  # type: ignore[attr-defined]

    def _jump(self) -> None:
        """Move the clock to the next timer, and make all timers of that moment ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._dead -= 1
        if not timers:
            if self._stopping:
                return
            raise NothingScheduled("nothing is scheduled: every task waits for another")
        self.now_ns = when = max(self.now_ns, timers[0][0])
        while timers and timers[0][0] <= when:
            timer = heapq.heappop(timers)[2]
            if timer._cancelled:
                self._dead -= 1
            else:
                timer._scheduled = False  # type: ignore[attr-defined]
                self._ready.append(timer)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, without what it does for debugging."""
        if self.is_closed():
            raise RuntimeError("the loop of this run is closed")
        handle = _Soon(callback, args, self)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(self.now_ns + round(delay * NS_PER_S), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(round(when * NS_PER_S), callback, args, context)

    def _call_at_ns(
        self, when: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when / NS_PER_S, callback, args, self)
        heapq.heappush(self._timers, (when, self._set, timer))
        self._set += 1
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a handle's `cancel`; the heap is rebuilt when most of it is dead."""
        if handle._scheduled:  # type: ignore[attr-defined]
            self._dead += 1
        if self._dead > CROWDED and self._dead > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._dead = 1  # the handle being cancelled is marked only after this call

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._home:
            raise RuntimeError("virtual time takes no calls from other threads")
        return self.call_soon(callback, *args, context=context)  # a signal handler of this very thread

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no executors: a thread would make the run irreproducible")

    def add_reader(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time waits for no file descriptors")

    def add_writer(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time waits for no file descriptors")


_virtual: VirtualTimeLoop | None = None  # the loop that is running, if it is a virtual one


class WallClockLoop(_Strict, asyncio.SelectorEventLoop):
    """Real time. Starts at 0 when the loop is made, and again when the run begins."""

    _scheduled: list[asyncio.TimerHandle]
    _origin = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def time(self) -> float:
        return super().time() - self._origin

    def restart(self) -> None:
        """Time is 0 now. Nothing may be waiting for a time, because it would come too late."""
        waiting = [timer for timer in self._scheduled if not timer.cancelled()]
        if waiting:
            raise RuntimeError(f"the clock starts again while {waiting} is set")
        self._origin = super().time()


def begin_time() -> None:
    """What came before was preparation. In virtual time that took none."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, WallClockLoop):
        loop.restart()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def run_live(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in real time."""
    with asyncio.Runner(loop_factory=WallClockLoop) as runner:
        return runner.run(main)

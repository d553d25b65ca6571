"""Waiting that a worker's death cuts short."""

from __future__ import annotations

import asyncio

from systems.backends.base import WorkerLost


class Lifeline:
    """The life of a worker on `devices`: its sleeps end with `WorkerLost` when it dies."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self._loop = asyncio.get_running_loop()
        self._lost: WorkerLost | None = None
        self._sleeping: list[asyncio.Future[None]] = []

    @property
    def alive(self) -> bool:
        return self._lost is None

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def sleep(self, seconds: float) -> None:
        self.check()
        future: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(seconds, _wake, future)
        self._sleeping.append(future)
        try:
            await future
        finally:
            timer.cancel()
            self._sleeping.remove(future)

    def end(self, why: str) -> WorkerLost:
        """The worker dies now; returns what its callers are told."""
        if self._lost is None:
            self._lost = WorkerLost(self.devices, why)
            for future in self._sleeping:
                if not future.done():
                    future.set_exception(WorkerLost(self.devices, why))
        return self._lost


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

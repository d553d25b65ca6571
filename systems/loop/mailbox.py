"""A queue with one reader, for streams. `asyncio.Queue` asks for the running loop at every wait, which
is a system call; with hundreds of thousands of waits a run that was 5 to 8 % of its time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out; any number of writers on the loop, one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        return self._items.popleft()

"""Worker processes on this machine, seen from the control process.

| what happens to a worker      | how it is noticed                      | what follows                     |
|-------------------------------|----------------------------------------|----------------------------------|
| it is killed (SIGKILL, -TERM) | its connection ends                    | `WorkerLost`; a new process      |
| it is given up (`kill`)       | -                                      | the same                         |
| it does not start             | no hello in time, or it ends before    | `ClusterUnfit`: the run ends     |
| it hangs                      | no beat, or no answer in time          | the same                         |
| it is out of memory, or fails | it says so, or ends in another way     | the same                         |

What would happen again is not tried again: a run with a worker that hangs is no measurement. A process that
the kernel kills for want of memory looks killed: it is replaced until it was killed too often.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any, Protocol, cast

from systems.backends.base import ClusterUnfit, WorkerLost
from systems.backends.live import wire
from systems.backends.live import worker as program
from systems.backends.live.store import Segment
from systems.machine import processes

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # a worker


@dataclass(frozen=True)
class Limits:
    """When silence is a fault, in seconds. Far above what a tiny worker takes on a busy machine."""

    start_s: float = 120.0  # from the process to its first message: it imports torch meanwhile
    answer_s: float = 60.0  # any single request but training ones
    train_s: float = 600.0  # a gradient or an optimizer step
    beats: int = 15  # beats missed in a row
    restarts: int = 20  # of one device in one run; more means that it will not stay up


KILLED_BY = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes of a process that somebody else ended


class Cause(StrEnum):
    """Why a worker is gone."""

    KILLED = "was killed"
    START = "did not start"
    HUNG = "hangs"
    FAILED = "failed"


class Worker(asyncio.Protocol):
    """One worker process: requests to it, what it streams, and its end."""

    def __init__(self, device: int, limits: Limits, command: Sequence[str]) -> None:
        self.device = device
        self.lost: WorkerLost | None = None
        self.cause: Cause | None = None
        self.on_chunks: Callable[[list[Any]], None] = lambda chunks: None
        self.on_end: Callable[[WorkerLost], None] = lambda lost: None
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._frames = wire.Frames()
        self._asked = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._known: set[int] = set()  # segments whose descriptor it has
        self._missed = 0
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # its stderr, read if it fails
        self._transport: asyncio.WriteTransport | None = None
        self._messages, theirs = socket.socketpair()
        self._descriptors, their_descriptors = socket.socketpair()
        fds = (theirs.fileno(), their_descriptors.fileno())
        self._process = subprocess.Popen(
            [*command, "--messages", str(fds[0]), "--descriptors", str(fds[1])],
            pass_fds=fds, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
            start_new_session=True, env=processes.environment(**ONE_THREAD),
        )  # fmt: skip
        theirs.close()
        their_descriptors.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    # ------------------------------------------------------------------------------- life

    async def started(self) -> None:
        """Returns when the process says hello. Raises `WorkerLost` if it was killed before, and
        `ClusterUnfit` if it does not start."""
        await self._loop.create_unix_connection(lambda: self, sock=self._messages)
        try:
            async with asyncio.timeout(self._limits.start_s):
                await self._hello
        except TimeoutError:
            self.end(Cause.START, f"nothing was heard from it within {self._limits.start_s:.0f} s")
        except WorkerLost:
            pass
        if self.lost is not None:
            raise self.lost if self.cause is Cause.KILLED else ClusterUnfit(str(self.lost))

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def missed_a_beat(self) -> None:
        """Called once a beat; too many without a word from the process, and it hangs.

        Before its hello it imports its libraries and says nothing; `started` watches over that.
        """
        self._missed += self._hello.done()
        if self._missed > self._limits.beats:
            self.end(Cause.HUNG, f"gave no sign of life for {self._limits.beats * wire.BEAT_S:.0f} s")

    def kill(self) -> None:
        """Give the process up. What it had streamed is still read."""
        self._kill()
        self._fail(Cause.KILLED, "given up")

    def end(self, cause: Cause, why: str) -> None:
        """The process is of no use any more."""
        self._kill()
        self._fail(cause, why)
        self.on_end(cast("WorkerLost", self.lost))

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    def _fail(self, cause: Cause, why: str) -> None:
        if self.lost is None:
            self.cause = cause
            self.lost = WorkerLost((self.device,), f"its worker {cause.value}: {why}")
            for future in [*self._pending.values(), self._hello]:
                if not future.done():
                    future.set_exception(self.lost)
                    future.exception()  # whoever waits is told; nobody has to

    def close(self) -> None:
        """Kill and reap the process; frees everything."""
        self._kill()
        self._fail(Cause.KILLED, "closed")
        self._process.wait()
        if self._transport is not None:
            self._transport.abort()
        self._messages.close()
        self._descriptors.close()
        self._said.close()

    # ------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._missed = 0
        for message in self._frames.feed(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost is None:
            self._explain_end()
        self.on_end(cast("WorkerLost", self.lost))

    def _explain_end(self) -> None:
        code = _exit_code(self._process)
        if code in KILLED_BY:
            self._fail(Cause.KILLED, f"signal {-code}")
        else:
            how = "its connection ended" if code is None else f"exit code {code}"
            how = f"signal {-code}" if code is not None and code < 0 else how
            self._fail(Cause.FAILED if self._hello.done() else Cause.START, self._last_words() or how)

    def _take(self, message: wire.Message) -> None:
        match message["op"]:
            case "chunks":
                self.on_chunks(message["chunks"])
            case "reply":
                future = self._pending.get(message["id"])
                if future is not None and not future.done():
                    future.set_result(message["result"])
            case "hello":
                if message["root"] != str(processes.ROOT):
                    self.end(Cause.START, f"it runs the code in {message['root']}, not in {processes.ROOT}")
                elif not self._hello.done():
                    self._hello.set_result(None)
            case "failed":
                self._fail(Cause.FAILED, message["why"])

    def _last_words(self) -> str:
        """The last line that the process printed."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    # ------------------------------------------------------------------------------- requests

    def tell(self, op: str, segments: Sequence[Segment] = (), **fields: Any) -> None:
        """Ask for something that needs no answer. `segments` are those that the message names."""
        if self.lost is not None or self._transport is None:
            return
        message = {"op": op, **fields}
        new = [segment for segment in segments if segment.number not in self._known]
        if new:
            socket.send_fds(self._descriptors, [b"."], [segment.fd for segment in new])
            message["new"] = [[segment.number, segment.length] for segment in new]
            self._known.update(segment.number for segment in new)
        self._transport.write(wire.encode(message))

    async def ask(
        self, op: str, segments: Sequence[Segment] = (), within_s: float | None = None, **fields: Any
    ) -> Any:
        """A request and its answer. Raises `WorkerLost` if the worker dies or does not answer in time."""
        self.check()
        limit_s = within_s or self._limits.answer_s
        self._asked += 1
        number, future = self._asked, self._loop.create_future()
        self._pending[number] = future
        try:
            self.tell(op, segments, id=number, **fields)
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            self.end(Cause.HUNG, f"did not answer '{op}' within {limit_s:.0f} s")
            raise cast("WorkerLost", self.lost) from None
        finally:
            del self._pending[number]


class Cluster(Protocol):
    """Where live workers come from: whoever starts them, and however a message gets there."""

    limits: Limits
    workers: dict[int, Worker]  # by device

    async def prepare(self) -> None:
        """Start all workers and wait for all. Raises `ClusterUnfit`."""
        ...

    def watch(self) -> None:
        """From now on a worker that stops beating is noticed."""
        ...

    async def restart(self, device: int) -> None:
        """A new worker for a device whose worker was killed. Raises `ClusterUnfit` if none stays up."""
        ...

    def close(self) -> None:
        """No worker is left behind."""
        ...


class LocalCluster:
    """One worker process a device, on this machine."""

    def __init__(
        self, devices: Sequence[int], limits: Limits | None = None, python: str = sys.executable
    ) -> None:
        self.limits = limits or Limits()
        self.workers: dict[int, Worker] = {}
        self._devices = tuple(devices)
        self._command = processes.command(program.__name__, python)
        self._restarts = dict.fromkeys(self._devices, 0)
        self._timer: asyncio.TimerHandle | None = None

    async def prepare(self) -> None:
        """Start all workers at once and wait for all. Raises `ClusterUnfit`."""
        for device in self._devices:
            self._start(device)
        for worker in self.workers.values():
            try:
                await worker.started()
            except WorkerLost as lost:
                raise ClusterUnfit(str(lost)) from None

    def _start(self, device: int) -> None:
        try:
            self.workers[device] = Worker(device, self.limits, self._command)
        except OSError as error:
            raise ClusterUnfit(f"device {device}: its worker did not start: {error}") from None

    def watch(self) -> None:
        """From now on a worker that stops beating is noticed."""
        self._timer = asyncio.get_running_loop().call_later(wire.BEAT_S, self.watch)
        for worker in self.workers.values():
            if worker.lost is None:
                worker.missed_a_beat()

    async def restart(self, device: int) -> None:
        """A new process for a device whose worker was killed; another one if that is killed as well."""
        old = self.workers[device]
        if old.lost is None:
            old.kill()
        while True:
            if old.cause is not Cause.KILLED:
                raise ClusterUnfit(str(old.lost))
            self._restarts[device] += 1
            if self._restarts[device] > self.limits.restarts:
                raise ClusterUnfit(f"{old.lost}; it was restarted {self.limits.restarts} times")
            old.close()
            self._start(device)
            old = self.workers[device]
            try:
                await old.started()
                return
            except WorkerLost:
                continue

    def close(self) -> None:
        """No process is left behind."""
        if self._timer is not None:
            self._timer.cancel()
        for worker in self.workers.values():
            worker.close()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Negative for a signal; None if the process is still there."""
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return None

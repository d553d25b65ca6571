"""A worker process: one logical device that outlives its roles.

    python -m systems.backends.live.worker --messages FD --descriptors FD

One thread does everything in turn: take the messages that are there, let the engine take a step, send what
there is to send. A second one beats every second, so that a process that is stopped or starved is told
apart from one that is busy, and ends the process when the control process is gone.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from systems.backends.base import TokenChunk
from systems.backends.live import wire
from systems.backends.live.roles import Generation, Learning, ServingRole, TrainingRole, preload
from systems.backends.live.store import Segment, floats, layout_from_json
from systems.machine import processes

OUT_OF_MEMORY = ("can't allocate memory", "annot allocate memory", "not enough memory", "bad_alloc")


# What a step did and took: sequences decoded, their context tokens, context tokens read in, seconds.
StepTime = tuple[int, int, int, float]


class Lines:
    """The connection to the control process: messages both ways, descriptors this way."""

    def __init__(self, messages: socket.socket, descriptors: socket.socket) -> None:
        self._messages = messages
        self._descriptors = descriptors
        self._frames = wire.Frames()
        self._inbox: deque[wire.Message] = deque()
        self._writing = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._writing:
            self._messages.sendall(wire.encode(message))

    def take(self, wait: bool) -> wire.Message | None:
        """The next message; None if there is none and this may not wait. Ends the process at the end."""
        while not self._inbox:
            if not wait and not select.select([self._messages], [], [], 0)[0]:
                return None
            data = self._messages.recv(1 << 16)
            if not data:
                os._exit(0)
            self._inbox.extend(self._frames.feed(data))
        return self._inbox.popleft()

    def descriptors(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found.extend(socket.recv_fds(self._descriptors, 1, count)[1])
        return found

    def beat(self) -> NoReturn:
        while True:
            time.sleep(wire.BEAT_S)
            try:
                self.send(op="beat")
            except OSError:
                os._exit(0)  # nobody is there any more


class Worker:
    """Answers one message after the other; each public method below `serve` is an operation."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._segments: dict[int, Segment] = {}
        self._role: ServingRole | TrainingRole | None = None
        self._step_times: list[StepTime] | None = None  # kept while somebody wants to know

    def serve(self) -> NoReturn:
        preload()
        self._lines.send(op="hello", pid=os.getpid(), root=str(processes.ROOT))
        while True:
            role = self._role
            busy = role is not None and role.busy
            while (message := self._lines.take(wait=not busy)) is not None:
                self._answer(message)
                busy = self._role is not None and self._role.busy
            if isinstance(self._role, ServingRole):
                if self._step_times is None:
                    self._turn(self._role)
                else:
                    self._step_times.append(self._timed_turn(self._role))

    def _turn(self, role: ServingRole) -> None:
        """One step of the engine, and what it streams."""
        self._stream(role.turn())

    def _stream(self, chunks: list[TokenChunk]) -> None:
        if chunks:
            self._lines.send(op="chunks", chunks=[wire.chunk_to_json(chunk) for chunk in chunks])

    def _timed_turn(self, role: ServingRole) -> StepTime:
        rows, kv_tokens, waiting = role.occupancy()
        began = time.perf_counter()
        self._turn(role)
        return rows, kv_tokens, waiting - role.occupancy()[2], time.perf_counter() - began

    def _answer(self, message: wire.Message) -> None:
        new: list[list[int]] = message.pop("new", [])
        for (number, length), fd in zip(new, self._lines.descriptors(len(new)) if new else [], strict=True):
            self._segments[number] = Segment(number, fd, length)
        operation: Callable[..., Any] = getattr(self, message.pop("op"))
        request = message.pop("id", None)
        result = operation(**message)
        if request is not None:
            if isinstance(self._role, ServingRole):
                self._stream(self._role.flush())
            self._lines.send(op="reply", id=request, result=result)

    # ------------------------------------------------------------------------------- roles

    def load_serving(self, how: wire.Message, version: int, segment: int, layout: list[Any]) -> None:
        self._role = None
        self._role = ServingRole(Generation.from_json(how), version, self._view(segment, layout))

    def load_training(
        self, how: wire.Message, rank: int, ranks: int, version: int, segment: int, layout: list[Any],
        reference: int, reference_layout: list[Any],
    ) -> None:  # fmt: skip
        self._role = None
        self._role = TrainingRole(
            Learning.from_json(how), rank, ranks, version, self._view(segment, layout),
            self._view(reference, reference_layout),
        )  # fmt: skip

    def warm(self) -> None:
        if self._role is None:
            raise ValueError("asked to warm up without a role")
        self._role.warm()

    def release(self) -> None:
        self._role = None

    def ready(self) -> None:
        """An answer is all that is asked for."""

    def map(self, segment: int, layout: list[Any]) -> None:
        """Map a segment and look at its tensors, which reads none of them."""
        self._view(segment, layout)

    # ------------------------------------------------------------------------------- serving

    def submit(self, works: list[list[Any]]) -> None:
        for raw in works:
            self._serving.submit(wire.work_from_json(raw))

    def abort(self, sequences: list[int]) -> list[Any]:
        return [wire.chunk_to_json(chunk) for chunk in self._serving.abort(sequences)]

    def ping(self) -> int:
        return self._serving.sent

    def update(self, version: int, segment: int, layout: list[Any], keep: bool) -> None:
        self._serving.update(version, self._view(segment, layout), keep)

    def time_steps(self) -> list[StepTime]:
        """Every step since the last such question; the first one starts the clock."""
        times, self._step_times = self._step_times or [], []
        return times

    # ------------------------------------------------------------------------------- training

    def rewind(self, exchange: int) -> None:
        self._training.rewind(self._segments[exchange].flat())

    def begin(self, batch: wire.Message, exchange: int) -> None:
        self._training.begin(wire.batch_from_json(batch), self._segments[exchange].flat())

    def gradient(self, mini: int, slot: int) -> Any:
        return self._training.gradient(mini, slot)

    def step(self, parts: list[Any]) -> Any:
        return self._training.step(parts)

    def refresh(self) -> None:
        self._training.refresh()

    def publish(self, weights: int, state: int) -> int:
        """Commit the step, and write the new weights and the state that the next step starts from."""
        version = self._training.commit()
        learner = self._training.learner
        self._segments[weights].write(learner.weights())
        self._segments[state].write(learner.state())
        return version

    # ------------------------------------------------------------------------------- helpers

    @property
    def _serving(self) -> ServingRole:
        if not isinstance(self._role, ServingRole):
            raise ValueError("asked to serve, but this is not its role")
        return self._role

    @property
    def _training(self) -> TrainingRole:
        if not isinstance(self._role, TrainingRole):
            raise ValueError("asked to train, but this is not its role")
        return self._role

    def _view(self, segment: int, layout: list[Any]) -> dict[str, torch.Tensor]:
        shapes = layout_from_json(layout)
        if floats(shapes) != self._segments[segment].length:
            raise ValueError(
                f"segment {segment} has {self._segments[segment].length} values, not its layout's"
            )
        return self._segments[segment].view(shapes)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the control process's business
    parser = argparse.ArgumentParser(description="started by the live backend")
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--descriptors", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = Lines(socket.socket(fileno=given.messages), socket.socket(fileno=given.descriptors))
    threading.Thread(target=lines.beat, daemon=True).start()
    try:
        Worker(lines).serve()
    except MemoryError as error:
        fail(lines, f"out of memory: {error}".rstrip(": "))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        short = any(phrase in str(error) for phrase in OUT_OF_MEMORY)
        fail(lines, f"out of memory: {said}" if short else said)


def fail(lines: Lines, why: str) -> NoReturn:
    """Say why this process cannot go on, and end it."""
    lines.send(op="failed", why=why)
    os._exit(1)


if __name__ == "__main__":
    main()

"""The contract that every backend keeps, and that `tests/contract` checks on each of them.

| the runtime calls   | and may rely on                                                              |
|---------------------|------------------------------------------------------------------------------|
| `prepare`           | returns when all devices can be leased; raises `ClusterUnfit` if one cannot    |
| `shift`             | yields the phases PARK .. READY in order; raises `WorkerLost` if a device dies |
| `serving(lease)`    | a worker for an ACTIVE serving lease; tokens of a sequence arrive in order     |
| `training(lease)`   | a worker for the ACTIVE training lease; `begin` forgets an unfinished step     |
| `restart(device)`   | returns when a lost device can be leased again; raises `ClusterUnfit` if never  |
| `lose(device)`      | kills what runs on a device (fault injection): its workers raise `WorkerLost`  |

Every chunk carries the lease epoch under which it was made, so that an answer which arrives after its
lease has ended is recognised and dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from systems.batching import Batch, MicroBatch
from systems.types import End, Kind, Lease, PhaseDone, Prompt, Role, Sequence, Shift, TrainStats


class WorkerLost(RuntimeError):
    """Workers on these devices are gone, with all state that was not streamed or stored."""

    def __init__(self, devices: Collection[int], why: str) -> None:
        super().__init__(f"devices {sorted(devices)}: {why}")
        self.devices = tuple(sorted(devices))


class ClusterUnfit(RuntimeError):
    """The backend cannot go on: a device cannot be had, or would be lost again in the same way."""


class Work(NamedTuple):
    """A sequence as a serving worker gets it. `tokens` is what was generated before, `length` of them."""

    id: int
    epoch: int
    role: Role
    sample: int
    key: int
    prompt: Prompt
    length: int
    tokens: tuple[int, ...] = ()
    group: int = -1  # sequences of a group and role begin with the same prompt
    cached_tokens: int = 0  # of the context: their KV cache is in host memory, and good for this replica

    @property
    def context_tokens(self) -> int:
        return self.prompt.length + self.length


class TokenChunk(NamedTuple):
    """`count` new tokens of a sequence, written by policy version `version`.

    `serial` counts a worker's streamed chunks from 0, so that a lost or doubled one is noticed; it is
    -1 on chunks that `abort` returns.
    """

    sequence: int
    epoch: int
    version: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    serial: int = -1
    end: End | None = None
    cached_tokens: int = 0  # of the context: what `abort` has kept in host memory


class Finished(TokenChunk):
    """The last chunk of a sequence. `end` says why it is the last, where text is real."""

    __slots__ = ()


Hear = Callable[[TokenChunk | WorkerLost], None]


class ServingWorker(Protocol):
    """One replica of the policy or of the judge."""

    def submit(self, works: Collection[Work]) -> None:
        """These sequences come to it at this moment, together."""
        ...

    async def abort(self, sequences: Collection[int], keep: bool = False) -> list[TokenChunk]:
        """Stop these and return their tokens that were not streamed yet; ended ones are absent.

        With `keep` their KV caches go to host memory, as far as there is room, before this returns. A worker
        that cannot do that keeps nothing, and says so in its chunks.
        """
        ...

    def listen(self, hear: Hear) -> None:
        """From now on `hear` is told every chunk as it comes, and at last that the worker has died, if it
        has. It is told nothing before this call, and nothing after `close`."""
        ...

    async def update(self, version: int, keep: bool = False) -> None:
        """Load a policy version. The worker holds no sequences while it does, or with `keep` it goes on with
        those that it holds and with their caches: what they had by then is streamed under the old version."""
        ...

    async def ping(self) -> int:
        """How many chunks were put into the stream so far."""
        ...

    def kv_tokens(self) -> float:
        """Context tokens of all that it holds, as last known."""
        ...

    def progress(self) -> Mapping[int, int]:
        """Tokens that are generated and not streamed yet, by sequence, as far as that is known."""
        ...

    def close(self) -> None: ...


class TrainingWorker(Protocol):
    """The training unit. Gradients are summed in micro-batch order wherever they were computed."""

    async def begin(self, batch: Batch) -> None: ...

    async def accumulate(self, micro: MicroBatch) -> None: ...

    async def step(self) -> TrainStats:
        """One optimizer step over what was accumulated since the last one."""
        ...

    async def publish(self) -> int:
        """Make the new policy version available to all; returns it."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A cluster, real or not."""

    kind: Kind

    async def prepare(self) -> None:
        """Bring the devices up, before the run's time begins. Raises `ClusterUnfit`."""
        ...

    def start(self) -> None:
        """Called once when the run's time begins, on the running loop."""
        ...

    def shift(self, shift: Shift, version: int) -> AsyncIterator[PhaseDone]:
        """Carry out PARK to READY for a drained shift; rollout targets load policy `version`."""
        ...

    def serving(self, lease: Lease) -> ServingWorker: ...

    def training(self, lease: Lease) -> TrainingWorker: ...

    async def restart(self, device: int) -> None: ...

    def lose(self, device: int) -> None: ...

    def close(self) -> None: ...


def work_of(sequence: Sequence, epoch: int, version: int = -1) -> Work:
    """What a worker that serves `version` is told about a sequence: a cache of another is of no use to it."""
    cached = sequence.cached_tokens if sequence.cached_version == version else 0
    return Work(
        sequence.id, epoch, sequence.role, sequence.sample.id, sequence.key, sequence.prompt,
        sequence.length, tuple(sequence.tokens), sequence.sample.group.id, cached,
    )  # fmt: skip

"""What a worker process does in its present role: generate, or train as one rank of the training unit.

A role is made from shared memory when it is loaded and dropped when it is released; the process, with its
libraries and its connection, stays.

| role      | makes its own           | shares                                                    |
|-----------|-------------------------|-----------------------------------------------------------|
| serving   | folded fp64 model, KV   | published weights (read)                                   |
| training  | model, Adam moments     | committed state (read, leader writes the next one), gradients |

Training: rank r computes the gradients of micro-batches r, r + ranks, ... into slots of a shared segment.
Rank 0, the leader, sums the slots in order and steps; the others then copy its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from systems.backends.base import Finished, TokenChunk, Work
from systems.batching import Batch
from systems.learning.grpo import GrpoConfig
from systems.learning.trainer import GrpoLearner, Stats, step_stats
from systems.model.config import ModelConfig
from systems.model.engine import Engine, Request
from systems.model.qwen3 import Qwen3
from systems.model.sampling import Sampler
from systems.model.serving import ServingModel
from systems.model.weights import load_standard
from systems.types import End

STREAM_STEPS = 16  # decode steps between two streams of unfinished sequences: what a death may cost
SEND_STEPS = 4  # decode steps between two messages: each one wakes the control process, which takes time too


def preload() -> None:
    """Import and set up what a first role would otherwise wait for: the first optimizer takes seconds."""
    parameter = torch.zeros(1, requires_grad=True)
    torch.optim.AdamW([parameter])
    (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Generation:
    """How a serving role generates: its model's shape, how tokens are drawn, and when it stops."""

    model: ModelConfig
    sampler: Sampler
    stop: int
    max_new: int
    max_running: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Generation:
        model, sampler = ModelConfig(**raw["model"]), Sampler(**raw["sampler"])
        return cls(model, sampler, raw["stop"], raw["max_new"], raw["max_running"])


@dataclass(frozen=True)
class Learning:
    """How the training role learns."""

    model: ModelConfig
    grpo: GrpoConfig
    vocab: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Learning:
        grpo = GrpoConfig(**{**raw["grpo"], "betas": tuple(raw["grpo"]["betas"])})
        return cls(ModelConfig(**raw["model"]), grpo, raw["vocab"])


class ServingRole:
    """One replica: an engine and what it has not streamed yet."""

    def __init__(self, how: Generation, version: int, weights: Mapping[str, Tensor]) -> None:
        self.how = how
        self.version = version
        self.engine = Engine(ServingModel(how.model, weights), how.sampler, how.stop, how.max_running)
        self.sent = 0  # chunks streamed, which is the next one's serial
        self._works: dict[int, Work] = {}
        self._streamed: dict[int, int] = {}  # sequence -> tokens that were streamed
        self._unsent: list[TokenChunk] = []
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._works)

    def warm(self) -> None:
        """Pay once for what a first request allocates."""
        prompt = (1,) * STREAM_STEPS
        self.engine.run([Request(-1, 0, prompt, 2)])

    def submit(self, work: Work) -> None:
        self._works[work.id] = work
        self._streamed[work.id] = work.length
        earlier = [0.0] * work.length
        self.engine.submit(
            Request(work.id, work.key, work.prompt.tokens, self.how.max_new, list(work.tokens), earlier)
        )

    def abort(self, sequences: Collection[int]) -> list[TokenChunk]:
        requests = self.engine.abort(sequences)
        return [self._chunk(request, TokenChunk, serial=-1, last=True) for request in requests]

    def update(self, version: int, weights: Mapping[str, Tensor], keep: bool = False) -> None:
        """Serve another version. Holds no sequences while it does, or goes on with those and their caches."""
        if keep:  # what they have by now was written by the old version
            growing = [r for r in self.engine.running if len(r.tokens) > self._streamed[r.id]]
            self._unsent.extend(self._stream(request, TokenChunk) for request in growing)
        elif self._works:
            raise ValueError(f"asked to load version {version} with {len(self._works)} sequences running")
        self.engine.model = ServingModel(self.how.model, weights)
        self.version = version

    def turn(self) -> list[TokenChunk]:
        """One step of the engine, and what is to be sent after it."""
        ended = self.engine.step()
        self._unsent.extend(self._stream(request, Finished, last=True) for request in ended)
        self._steps += 1
        if self._steps % STREAM_STEPS == 0:
            growing = [r for r in self.engine.running if len(r.tokens) > self._streamed[r.id]]
            self._unsent.extend(self._stream(request, TokenChunk) for request in growing)
        return self.flush() if self._steps % SEND_STEPS == 0 or not self.busy else []

    def flush(self) -> list[TokenChunk]:
        """What was streamed and not sent yet: it comes before any answer."""
        chunks, self._unsent = self._unsent, []
        return chunks

    def occupancy(self) -> tuple[int, int, int]:
        """Sequences that are decoded and their context tokens, and context tokens that wait to be read in."""
        running, waiting = self.engine.running, self.engine.waiting
        return len(running), sum(len(r.context) for r in running), sum(len(r.context) for r in waiting)

    def _stream(self, request: Request, form: type[TokenChunk], last: bool = False) -> TokenChunk:
        chunk = self._chunk(request, form, self.sent, last)
        self.sent += 1
        return chunk

    def _chunk(self, request: Request, form: type[TokenChunk], serial: int, last: bool) -> TokenChunk:
        work, start = self._works[request.id], self._streamed[request.id]
        tokens, logprobs = tuple(request.tokens[start:]), tuple(request.logprobs[start:])
        if last:
            del self._works[request.id], self._streamed[request.id]
        else:
            self._streamed[request.id] = len(request.tokens)
        end = None
        if form is Finished:
            end = End.STOP if request.tokens[-1] == self.how.stop else End.LENGTH
        return form(work.id, work.epoch, self.version, len(tokens), tokens, logprobs, serial, end)


class TrainingRole:
    """One rank. `reference` are the weights that a KL term is measured against."""

    busy = False

    def __init__(
        self, how: Learning, rank: int, ranks: int, version: int, state: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        model = load_standard(Qwen3(how.model), reference)
        self.learner = GrpoLearner(model, how.grpo, how.vocab, published=lambda version, weights: None)
        self.learner.adopt(version, state)
        self.rank, self.ranks = rank, ranks
        self._exchange = torch.zeros(0)
        self._length = sum(parameter.numel() for parameter in self.learner.parameters)
        self._batch: Batch | None = None

    def warm(self) -> None:
        self.learner.warm()

    def rewind(self, exchange: Tensor) -> None:
        """The leader goes back to the committed state and shows its weights."""
        self._exchange = exchange
        self.learner.rewind()
        self._show_weights()

    def begin(self, batch: Batch, exchange: Tensor) -> None:
        self._exchange = exchange
        if self.rank:
            self.learner.version = batch.version
            self.refresh()
        micros = [micro for mini in batch.mini_batches for micro in mini]
        self.learner.prepare(batch, [micro for micro in micros if micro.index % self.ranks == self.rank])
        self._batch = batch

    def gradient(self, mini: int, slot: int) -> Stats:
        """Micro-batch `slot` of mini-batch `mini`: its gradient goes into slot `slot`."""
        if self._batch is None:
            raise ValueError("asked for a gradient before a batch")
        gradient, stats = self.learner.gradient(self._batch.mini_batches[mini][slot])
        torch.cat([part.reshape(-1) for part in gradient], out=self._slot(slot))
        return stats

    def step(self, parts: list[Stats]) -> Stats:
        """The leader applies the first `len(parts)` slots in order."""
        norm = self.learner.apply([self._parts(self._slot(slot)) for slot in range(len(parts))])
        self._show_weights()
        return step_stats(norm, parts)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the leader's weights."""
        shown = self._parts(self._weights())
        for parameter, weights in zip(self.learner.parameters, shown, strict=True):
            parameter.copy_(weights)

    def commit(self) -> int:
        self.learner.commit()
        return self.learner.version

    # What is shared: slot 0, slot 1, ..., and the leader's weights at the end.

    def _slot(self, slot: int) -> Tensor:
        return self._exchange[slot * self._length : (slot + 1) * self._length]

    def _weights(self) -> Tensor:
        return self._exchange[-self._length :]

    @torch.no_grad()
    def _show_weights(self) -> None:
        torch.cat([parameter.reshape(-1) for parameter in self.learner.parameters], out=self._weights())

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.learner.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.learner.parameters, strict=True)]

"""A small serving engine: continuous batching, abort with partial tokens, resume by re-prefill.

Invariants
* What a sequence generates depends on the weights, the seed, its key and its context, never on its
  neighbours, its slot, or how often it was aborted and resumed.
* Rows 0..n-1 of the cache are the running sequences; a finished row is filled from the last one.
* A sequence ends with the stop token or after `max_new` generated tokens, whichever comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from systems.model.sampling import Sampler
from systems.model.serving import Cache, ServingModel

PREFILL_ROWS = 16  # rows a prefill batch: contexts are sorted by length, so few rows mean little padding
ADMIT_ROWS = 8  # sequences join together, because reading in one costs nearly as much as reading in eight
CACHE_STEP = 64  # the cache grows by whole steps of this many positions


@dataclass(slots=True)
class Request:
    """One sequence to continue. `tokens` and `logprobs` may hold an earlier part and are appended to.

    `key` is the identity that the sampling noise is drawn for; `max_new` counts all generated tokens,
    the earlier part included.
    """

    id: int
    key: int
    prompt: tuple[int, ...]
    max_new: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)


class Engine:
    """Serves one model. `step()` admits what fits, advances every running sequence by one token."""

    def __init__(self, model: ServingModel, sampler: Sampler, stop: int, max_running: int = 256) -> None:
        self.model = model
        self.sampler = sampler
        self.stop = stop
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache: Cache = []
        self._span = 0  # positions allocated in the cache
        self._last = torch.zeros(0, dtype=torch.long)  # last token of each row, not yet in the cache
        self._position = torch.zeros(0, dtype=torch.long)  # where that token belongs
        self._key = torch.zeros(0, dtype=torch.long)

    def submit(self, request: Request) -> None:
        if request.max_new <= len(request.tokens):
            raise ValueError(f"sequence {request.id} has no tokens left to generate")
        longest, limit = len(request.prompt) + request.max_new, self.model.config.max_positions
        if longest > limit:
            raise ValueError(f"sequence {request.id} may grow to {longest} tokens, the model has {limit}")
        self.waiting.append(request)

    @torch.inference_mode()
    def abort(self, ids: Iterable[int]) -> list[Request]:
        """Stop these sequences and hand them back with what they have; unknown ids are ignored."""
        wanted = frozenset(ids)
        aborted = [request for request in self.waiting if request.id in wanted]
        self.waiting = deque(request for request in self.waiting if request.id not in wanted)
        for row in reversed(range(len(self.running))):
            if self.running[row].id in wanted:
                aborted.append(self.running[row])
                self._remove(row)
        return aborted

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance by one token; returns the sequences that ended in this step."""
        if self.running:
            self._decode()
        free = self.max_running - len(self.running)
        if self.waiting and free >= min(len(self.waiting), ADMIT_ROWS, self.max_running):
            self._admit()
        return self._retire()

    def run(self, requests: Iterable[Request]) -> list[Request]:
        """Generate all of `requests` to their ends; returns them in the order given."""
        batch = list(requests)
        for request in batch:
            self.submit(request)
        while self.waiting or self.running:
            self.step()
        return batch

    def _decode(self) -> None:
        logits = self.model.decode(self._last, self._position, self._cache, int(self._position.max()) + 1)
        self._position = self._position + 1
        self._last = self._draw(logits, self.running, self._key, self._position)

    def _draw(self, logits: Tensor, requests: list[Request], key: Tensor, position: Tensor) -> Tensor:
        tokens, logprobs = self.sampler.draw(logits, key, position)
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
        return tokens

    def _admit(self) -> None:
        """Prefill waiting sequences, identical contexts once, and draw their next token."""
        fresh: dict[tuple[int, ...], list[Request]] = {}
        for _ in range(min(len(self.waiting), self.max_running - len(self.running))):
            request = self.waiting.popleft()
            fresh.setdefault(request.context, []).append(request)
        contexts = sorted(fresh, key=len)
        for start in range(0, len(contexts), PREFILL_ROWS):
            part = contexts[start : start + PREFILL_ROWS]
            self._prefill([(context, fresh[context]) for context in part])

    def _prefill(self, part: list[tuple[tuple[int, ...], list[Request]]]) -> None:
        lengths = torch.tensor([len(context) for context, _ in part])
        width = int(lengths.max())
        ids = torch.zeros(len(part), width, dtype=torch.long)
        for row, (context, _) in enumerate(part):
            ids[row, : len(context)] = torch.tensor(context)
        logits, caches = self.model.prefill(ids, lengths)
        requests = [request for _, sharing in part for request in sharing]
        source = torch.tensor([row for row, (_, sharing) in enumerate(part) for _ in sharing])
        first = len(self.running)
        longest = max(len(request.prompt) + request.max_new for request in requests)
        self._reserve(first + len(requests), longest)
        for stored, entry in zip(self._cache, caches, strict=True):
            stored[:, first : first + len(requests), :, :width] = entry[:, source]
        key = torch.tensor([request.key for request in requests])
        position = lengths[source]
        tokens = self._draw(logits[source], requests, key, position)
        self.running.extend(requests)
        self._last = torch.cat([self._last, tokens])
        self._position = torch.cat([self._position, position])
        self._key = torch.cat([self._key, key])

    def _reserve(self, rows: int, span: int) -> None:
        """Grow the cache to at least `rows` x `span`, keeping what is in it."""
        have = self._cache[0].shape[1] if self._cache else 0
        if rows <= have and span <= self._span:
            return
        rows = max(have, rows if not have else min(self.max_running, max(rows, 2 * have)))
        span = max(self._span, -(-span // CACHE_STEP) * CACHE_STEP)
        grown = self.model.new_cache(rows, span)
        for stored, old in zip(grown, self._cache, strict=False):
            stored[:, :have, :, : self._span] = old
        self._cache, self._span = grown, span

    def _retire(self) -> list[Request]:
        ended = []
        for row in reversed(range(len(self.running))):
            request = self.running[row]
            if request.tokens[-1] == self.stop or len(request.tokens) >= request.max_new:
                ended.append(request)
                self._remove(row)
        return ended

    def _remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = len(self.running) - 1
        if row != last:
            used = int(self._position[last])
            for stored in self._cache:
                stored[:, row, :, :used] = stored[:, last, :, :used]
            self.running[row] = self.running[last]
            for tensor in (self._last, self._position, self._key):
                tensor[row] = tensor[last]
        self.running.pop()
        self._last, self._position, self._key = (
            tensor[:last] for tensor in (self._last, self._position, self._key)
        )

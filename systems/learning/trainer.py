"""The learner: real gradients on canonical micro-batches, one optimizer, published versions.

Invariants
* A step is a transaction: `begin` forgets whatever an unfinished step did, `publish` commits.
* The gradient of a micro-batch depends on the weights and on its samples only, and is computed by one
  thread, because sums over tokens have other bits with two; gradients are summed in micro-batch order.
  So the update is the same bits however many workers computed it.
* Within a micro-batch rows are sorted by length and cut into bins, which pads less. The bins depend on
  the samples alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from systems.backends.base import TrainStats
from systems.batching import Batch, MicroBatch, TrainSample
from systems.learning.grpo import GrpoConfig, advantages, kl_penalty, token_loss
from systems.model.qwen3 import Qwen3
from systems.model.weights import to_standard

BIN_ROWS = 8  # rows a forward pass: few enough to pad little, enough to keep GEMMs busy

State = dict[str, Tensor]
Gradient = list[Tensor]


@contextmanager
def one_thread() -> Iterator[None]:
    """Arithmetic whose bits must not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class GrpoLearner:
    """Trains `model` in place. `published` is called with every committed version and its weights."""

    def __init__(
        self, model: Qwen3, config: GrpoConfig, vocab: int, published: Callable[[int, State], None]
    ) -> None:
        self.model = model
        self.config = config
        self.version = 0
        self._vocab = vocab
        self._published = published
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, config.lr, betas=config.betas, weight_decay=0.0, foreach=True
        )
        self._reference = copy.deepcopy(model).requires_grad_(False) if config.kl else None
        self._committed = self._snapshot()
        self._dirty = False
        self._advantage: dict[int, float] = {}
        self._proximal: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}  # mini-batch -> response tokens that have an advantage
        self._gradients: list[tuple[int, Gradient]] = []
        self._stats: dict[str, float] = {}
        published(0, self._weights())

    # ------------------------------------------------------------------------------- the contract

    @one_thread()
    def begin(self, batch: Batch) -> None:
        """Prepare the RL step that consumes `batch` at its version."""
        if batch.version != self.version:
            raise ValueError(f"the batch is for version {batch.version}, the trainer is at {self.version}")
        if self._dirty:
            self._restore()
        self._dirty = True
        self._gradients = []
        self._advantage = advantages(batch.samples)
        self._proximal = self._proximal_of_stale(batch)
        self._tokens = {
            index: sum(s.length for micro in mini for s in self._useful(micro))
            for index, mini in enumerate(batch.mini_batches)
        }

    @one_thread()
    def accumulate(self, micro: MicroBatch) -> None:
        self._gradients.append((micro.index, self._gradient(micro)))

    @one_thread()
    def step(self) -> TrainStats:
        """Sum the gradients in micro-batch order, clip, and let the optimizer take one step."""
        ordered = [gradient for _, gradient in sorted(self._gradients, key=lambda pair: pair[0])]
        self._gradients = []
        for index, parameter in enumerate(self._parameters):
            total = ordered[0][index]
            for gradient in ordered[1:]:
                total = total + gradient[index]
            parameter.grad = total
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        stats, self._stats = self._stats, {}
        return TrainStats({"grad_norm": float(norm), **stats})

    def publish(self) -> int:
        self.version += 1
        self._committed = self._snapshot()
        self._dirty = False
        self._published(self.version, self._weights())
        return self.version

    # ------------------------------------------------------------------------------- the update

    def _useful(self, micro: MicroBatch) -> list[TrainSample]:
        """Samples that can move the policy: without a KL term a zero advantage has no gradient."""
        if self.config.kl:
            return list(micro.samples)
        return [sample for sample in micro.samples if self._advantage[sample.id] != 0.0]

    def _gradient(self, micro: MicroBatch) -> Gradient:
        """The gradient of this micro-batch's part of its mini-batch's loss."""
        self.model.zero_grad(set_to_none=True)
        useful = self._useful(micro)
        clipped = surprise = 0.0
        tokens = max(1, self._tokens[micro.mini_batch])
        for rows in _bins(useful):
            ids, mask, behaviour = _pad(rows)
            logprobs = self._logprobs(self.model, ids)
            proximal = behaviour.clone()
            for index, sample in enumerate(rows):
                if sample.id in self._proximal:
                    stale = self._proximal[sample.id]
                    start = sample.prompt.length - 1
                    proximal[index, start : start + sample.length] = stale
            advantage = torch.tensor([[self._advantage[sample.id]] for sample in rows])
            loss = token_loss(logprobs, proximal, behaviour, advantage, self.config)
            if self._reference is not None:
                with torch.no_grad():
                    reference = self._logprobs(self._reference, ids)
                loss = loss + self.config.kl * kl_penalty(logprobs, reference)
            total = (loss * mask).sum() / tokens
            aux = self.model.config.router_aux_coef
            if aux:
                total = total + aux * self.model.aux_loss() * (sum(s.length for s in rows) / tokens)
            total.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                ratio = (logprobs - proximal).exp()
                low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
                clipped += float((((ratio < low) | (ratio > high)) * mask).sum())
                surprise += float(((behaviour - logprobs) * mask).sum())
        self._count("clip_fraction", clipped / tokens)
        self._count("behaviour_kl", surprise / tokens)
        return [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]

    def _count(self, name: str, amount: float) -> None:
        self._stats[name] = self._stats.get(name, 0.0) + amount

    def _logprobs(self, model: Qwen3, ids: Tensor) -> Tensor:
        """Log-probability of each next token [B, T - 1], under the distribution that is sampled from."""
        logits: Tensor = model(ids[:, :-1])
        logits = logits[..., : self._vocab] / self.config.temperature
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]

    @torch.no_grad()
    def _proximal_of_stale(self, batch: Batch) -> dict[int, Tensor]:
        """Proximal log-probabilities of responses with tokens of older versions.

        Tokens of the present version keep their behaviour log-probabilities.
        """
        stale = [s for s in batch.samples if any(g.version != batch.version for g in s.segments)]
        found: dict[int, Tensor] = {}
        for rows in _bins([sample for sample in stale if self._advantage[sample.id] or self.config.kl]):
            ids, _, behaviour = _pad(rows)
            logprobs = self._logprobs(self.model, ids)
            for index, sample in enumerate(rows):
                start = sample.prompt.length - 1
                proximal = behaviour[index, start : start + sample.length].clone()
                for segment in sample.segments:
                    if segment.version != batch.version:
                        part = slice(start + segment.start, start + segment.stop)
                        proximal[segment.start : segment.stop] = logprobs[index, part]
                found[sample.id] = proximal
        return found

    # ------------------------------------------------------------------------------- transactions

    def _weights(self) -> State:
        return {name: tensor.clone() for name, tensor in to_standard(self.model).items()}

    def _snapshot(self) -> tuple[list[Tensor], Any]:
        weights = [parameter.detach().clone() for parameter in self._parameters]
        return weights, copy.deepcopy(self._optimizer.state_dict())

    @torch.no_grad()
    def _restore(self) -> None:
        weights, optimizer = self._committed
        for parameter, saved in zip(self._parameters, weights, strict=True):
            parameter.copy_(saved)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))
        self._stats = {}


def _bins(samples: list[TrainSample]) -> list[list[TrainSample]]:
    ordered = sorted(samples, key=lambda sample: (sample.total_tokens, sample.id))
    return [ordered[i : i + BIN_ROWS] for i in range(0, len(ordered), BIN_ROWS)]


def _pad(rows: list[TrainSample]) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, T], and mask and behaviour log-probabilities [B, T - 1] of the response tokens."""
    width = max(sample.total_tokens for sample in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width - 1)
    behaviour = torch.zeros(len(rows), width - 1)
    for row, sample in enumerate(rows):
        ids[row, : sample.total_tokens] = torch.tensor((*sample.prompt.tokens, *sample.tokens))
        response = slice(sample.prompt.length - 1, sample.total_tokens - 1)
        mask[row, response] = 1.0
        behaviour[row, response] = torch.tensor(sample.logprobs)
    return ids, mask, behaviour

"""The learner: real gradients on canonical micro-batches, one optimizer, published versions.

Invariants
* A step is a transaction: `begin` forgets whatever an unfinished step did, `publish` commits.
* `gradient` and `apply` are all that a step is made of, so ranks in other processes can share it: each
  computes gradients of its own micro-batches, one applies them all.
* The gradient of a micro-batch depends on the weights and on its samples only, and is computed by one
  thread, because sums over tokens have other bits with two; gradients are summed in micro-batch order.
  So the update is the same bits however many workers computed it.
* Within a micro-batch rows are sorted by length and cut into bins, which pads less. The bins depend on
  the samples alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from systems.batching import Batch, MicroBatch, TrainSample
from systems.learning.grpo import GrpoConfig, advantages, kl_penalty, token_loss
from systems.model.qwen3 import Qwen3
from systems.model.weights import to_standard
from systems.types import TrainStats

BIN_ROWS = 8  # rows a forward pass: few enough to pad little, enough to keep GEMMs busy

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for a parameter

State = dict[str, Tensor]
Gradient = list[Tensor]
Stats = dict[str, float]


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
        self._gradients: list[tuple[int, Gradient, Stats]] = []
        published(0, self.weights())

    # ------------------------------------------------------------------------------- the contract

    def begin(self, batch: Batch) -> None:
        """Prepare the RL step that consumes `batch` at its version."""
        self.rewind()
        self.prepare(batch, [micro for mini in batch.mini_batches for micro in mini])
        self._gradients = []

    def accumulate(self, micro: MicroBatch) -> None:
        self._gradients.append((micro.index, *self.gradient(micro)))

    def step(self) -> TrainStats:
        """Apply what was accumulated, in micro-batch order."""
        ordered = sorted(self._gradients, key=lambda entry: entry[0])
        self._gradients = []
        norm = self.apply([gradient for _, gradient, _ in ordered])
        return TrainStats(step_stats(norm, [stats for _, _, stats in ordered]))

    def publish(self) -> int:
        self.commit()
        self._published(self.version, self.weights())
        return self.version

    # ------------------------------------------------------------------------------- what a step is made of

    def rewind(self) -> None:
        """Forget what an unfinished step did to the weights and the optimizer."""
        if self._dirty:
            self._restore()
        self._dirty = True

    @one_thread()
    def prepare(self, batch: Batch, mine: Sequence[MicroBatch]) -> None:
        """What gradients of the micro-batches `mine` need to know of their batch."""
        if batch.version != self.version:
            raise ValueError(f"the batch is for version {batch.version}, the trainer is at {self.version}")
        self._advantage = advantages(batch.samples)
        self._proximal = {}
        for micro in mine:
            self._proximal |= self._proximal_of_stale(micro, batch.version)
        self._tokens = {
            index: sum(s.length for micro in mini for s in self._useful(micro))
            for index, mini in enumerate(batch.mini_batches)
        }

    @one_thread()
    def gradient(self, micro: MicroBatch) -> tuple[Gradient, Stats]:
        """The gradient of this micro-batch's part of its mini-batch's loss, and its part of the stats."""
        return self._gradient(micro)

    @one_thread()
    def apply(self, gradients: Sequence[Gradient]) -> float:
        """Sum gradients in the order given, clip, let the optimizer take a step; returns their norm."""
        for index, parameter in enumerate(self._parameters):
            total = gradients[0][index]
            for gradient in gradients[1:]:
                total = total + gradient[index]
            parameter.grad = total
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def commit(self) -> None:
        """The step is done: from now on this is what `rewind` goes back to."""
        self.version += 1
        self._committed = self._snapshot()
        self._dirty = False

    # ------------------------------------------------------------------------------- state

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """In the order of gradients."""
        return self._parameters

    def weights(self) -> State:
        """A copy of the present weights, under standard names."""
        return {name: tensor.clone() for name, tensor in to_standard(self.model).items()}

    def state(self) -> State:
        """All that a step starts from, as fp32 tensors: weights and Adam moments. Nothing is copied."""
        state: State = {}
        for index, parameter in enumerate(self._parameters):
            kept = self._optimizer.state[parameter] or _no_moments(parameter)
            state[f"weight.{index}"] = parameter.detach()
            state |= {f"{name}.{index}": kept[name] for name in MOMENTS}
        return state

    @torch.no_grad()
    def adopt(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Go on from a committed `state` of another learner."""
        self.version = version
        for index, parameter in enumerate(self._parameters):
            parameter.copy_(state[f"weight.{index}"])
            self._optimizer.state[parameter] = {name: state[f"{name}.{index}"].clone() for name in MOMENTS}
        self._committed = self._snapshot()
        self._dirty = False

    @one_thread()
    def warm(self) -> None:
        """Pay once for what a first step allocates; leaves weights and gradients alone."""
        ids = torch.zeros(1, 8, dtype=torch.long)
        self._logprobs(self.model, ids).sum().backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------------------- the update

    def _useful(self, micro: MicroBatch) -> list[TrainSample]:
        """Samples that can move the policy: without a KL term a zero advantage has no gradient."""
        if self.config.kl:
            return list(micro.samples)
        return [sample for sample in micro.samples if self._advantage[sample.id] != 0.0]

    def _gradient(self, micro: MicroBatch) -> tuple[Gradient, Stats]:
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
        gradient = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        return gradient, {"clip_fraction": clipped / tokens, "behaviour_kl": surprise / tokens}

    def _logprobs(self, model: Qwen3, ids: Tensor) -> Tensor:
        """Log-probability of each next token [B, T - 1], under the distribution that is sampled from."""
        logits: Tensor = model(ids[:, :-1])
        logits = logits[..., : self._vocab] / self.config.temperature
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]

    @torch.no_grad()
    def _proximal_of_stale(self, micro: MicroBatch, version: int) -> dict[int, Tensor]:
        """Proximal log-probabilities of responses with tokens of older versions.

        Tokens of the present version keep their behaviour log-probabilities.
        """
        stale = [s for s in micro.samples if any(g.version != version for g in s.segments)]
        found: dict[int, Tensor] = {}
        for rows in _bins([sample for sample in stale if self._advantage[sample.id] or self.config.kl]):
            ids, _, behaviour = _pad(rows)
            logprobs = self._logprobs(self.model, ids)
            for index, sample in enumerate(rows):
                start = sample.prompt.length - 1
                proximal = behaviour[index, start : start + sample.length].clone()
                for segment in sample.segments:
                    if segment.version != version:
                        part = slice(start + segment.start, start + segment.stop)
                        proximal[segment.start : segment.stop] = logprobs[index, part]
                found[sample.id] = proximal
        return found

    # ------------------------------------------------------------------------------- transactions

    def _snapshot(self) -> tuple[list[Tensor], Any]:
        weights = [parameter.detach().clone() for parameter in self._parameters]
        return weights, copy.deepcopy(self._optimizer.state_dict())

    @torch.no_grad()
    def _restore(self) -> None:
        weights, optimizer = self._committed
        for parameter, saved in zip(self._parameters, weights, strict=True):
            parameter.copy_(saved)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))


def step_stats(norm: float, parts: Sequence[Stats]) -> Stats:
    """Stats of an optimizer step from those of its micro-batches, summed in their order."""
    return {"grad_norm": norm, **{name: sum(part[name] for part in parts) for name in parts[0]}}


def _no_moments(parameter: Tensor) -> State:
    zeros = torch.zeros_like(parameter)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.zeros(())}


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

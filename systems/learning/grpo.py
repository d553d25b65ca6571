"""Group-relative policy optimisation, as arithmetic: advantages, importance weights, the token loss.

    advantage   (reward - mean of its group) / (standard deviation of its group + 1e-4)   (GRPO)
    ratio       pi(token) / pi_proximal(token), clipped to [1 - low, 1 + high]             (clip-higher)
    weight      min(pi_proximal / pi_behaviour, cap), token by token                       (truncated IS)
    loss        - sum(weight * min(ratio * A, clip(ratio) * A)) / tokens of the mini-batch

pi_proximal is the policy at the version at which the batch is consumed. A token that was written at
that version has behaviour = proximal, so its weight is 1; older segments get theirs from a forward
pass. Sources: Shao et al. 2024 (GRPO), Yu et al. 2025 (clip-higher, token mean), Yao et al. 2025 (TIS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from systems.batching import TrainSample

STD_FLOOR = 1e-4  # keeps a nearly unanimous group from exploding; a unanimous one has advantage 0


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """Hyper-parameters of the update."""

    lr: float
    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    kl: float = 0.0
    temperature: float = 1.0
    grad_clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)


def advantages(samples: Sequence[TrainSample]) -> dict[int, float]:
    """Group-normalised advantage of every sample, by its id."""
    groups: dict[int, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    found: dict[int, float] = {}
    for members in groups.values():
        rewards = [member.reward for member in members]
        if min(rewards) == max(rewards):  # exactly 0, which a mean of equal fractions need not give
            found.update(dict.fromkeys((member.id for member in members), 0.0))
            continue
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
        for member in members:
            found[member.id] = (member.reward - mean) / (variance**0.5 + STD_FLOOR)
    return found


def token_loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor, config: GrpoConfig
) -> Tensor:
    """Loss of each token, to be masked and summed; all inputs broadcast to [B, T]."""
    ratio = (logprobs - proximal).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = (proximal - behaviour).exp().clamp(max=config.tis_cap)
    return -weight * torch.minimum(ratio * advantage, clipped * advantage)


def kl_penalty(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) of each token (Schulman 2020)."""
    difference = reference - logprobs
    return difference.exp() - difference - 1

"""Sampling whose randomness belongs to a token, not to a batch.

The noise of a token is a hash of (seed, sequence key, position). Two runs that place, batch, migrate
or resume a sequence differently therefore draw the same token from the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit constants; torch wraps on overflow.
_GAMMA = -0x61C8864680B583EB
_MIX_A = -0x40A7B892E31B1A47
_MIX_B = -0x6B2FB644ECCEEE15


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_A
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def keyed_uniform(seed: int, key: Tensor, position: Tensor) -> Tensor:
    """Uniforms in (0, 1), fp64 [B], that depend only on `seed` and the int64 `key`, `position` [B]."""
    bits = _mix(_mix(key * _GAMMA + seed) + position * _GAMMA + 1)
    return ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)


@dataclass(frozen=True, slots=True)
class Sampler:
    """How tokens are drawn. `temperature` 0 is greedy; ids from `vocab` upwards are never drawn."""

    vocab: int
    temperature: float = 1.0
    seed: int = 0

    def draw(self, logits: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B] and their log-probabilities, rounded to fp32 [B], from logits [B, V].

        Log-probabilities are those of the distribution drawn from; for greedy decoding, of
        temperature 1. Rounding them to fp32 hides differences in the last bits of fp64.
        """
        logits = logits[:, : self.vocab].double()
        if self.temperature > 0:
            logprobs = (logits / self.temperature).log_softmax(-1)
            mass = logprobs.exp().cumsum(-1)
            target = keyed_uniform(self.seed, key, position) * mass[:, -1]
            tokens = (mass < target[:, None]).sum(-1).clamp_(max=self.vocab - 1)
        else:
            logprobs = logits.log_softmax(-1)
            tokens = logits.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0].float()

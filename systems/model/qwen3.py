"""Forward pass of Qwen3 and Qwen3-MoE, as trained (`serving.py` has the form that generates).

Invariants
* The mathematics is that of `transformers`' Qwen3ForCausalLM / Qwen3MoeForCausalLM (tested against it).
* Parameters are kept fused (qkv, gate+up, experts stacked) because at this size the cost of a step is
  the number of operators, not their arithmetic; `weights.py` converts to and from standard names.
* A row's result must not depend on who else is in the batch. In fp32 it does on a CPU (GEMM kernels
  differ by shape); in fp64, with log-probabilities rounded to fp32, no difference has been observed.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from systems.model.config import ModelConfig


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.width = (width,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.width, self.weight, self.eps)


class DenseFfn(nn.Module):
    """SwiGLU with gate and up projections fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * config.ffn, config.hidden))
        self.down = nn.Parameter(torch.empty(config.hidden, config.ffn))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class MoeFfn(nn.Module):
    """Top-k routed experts, normalised weights, one GEMM pair per expert that has tokens.

    Each token's k contributions are summed in slot order, so a token's result does not depend on
    which other tokens share its experts. After a forward pass with gradients `aux` holds the
    load-balancing loss of the batch (Switch Transformer form: experts * sum(f * p) / k).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.router = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert_ffn, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_ffn))
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = F.linear(x, self.router).softmax(-1)
        weight, expert = probs.topk(self.k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        experts = len(self.router)
        if torch.is_grad_enabled():
            chosen = torch.zeros_like(probs).scatter_(1, expert, 1.0).mean(0)
            self.aux = experts * (chosen * probs.mean(0)).sum() / self.k
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        # A permutation of k copies: its gradient is a permutation and a sum in slot order, whereas that
        # of a gather with repeated rows is added up in whatever order threads get to it.
        copies = x.unsqueeze(1).expand(-1, self.k, -1).reshape(len(flat), -1)
        rows = copies.index_select(0, order)
        outputs = []
        start = 0
        for index, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
            if count:
                gate, up = F.linear(rows[start : start + count], self.gate_up[index]).chunk(2, -1)
                outputs.append(F.linear(F.silu(gate) * up, self.down[index]))
            start += count
        slots = x.new_empty(len(flat), shape[-1]).index_copy(0, order, torch.cat(outputs))
        return (slots.view(-1, self.k, shape[-1]) * weight.unsqueeze(-1)).sum(1).view(shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half convention, over the whole head."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Pre-norm decoder layer. Attention normalises q and k per head before the rotation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_attention = RmsNorm(config.hidden, config.rms_eps)
        self.norm_ffn = RmsNorm(config.hidden, config.rms_eps)
        self.norm_q = RmsNorm(config.head_dim, config.rms_eps)
        self.norm_k = RmsNorm(config.head_dim, config.rms_eps)
        self.qkv = nn.Parameter(torch.empty(config.qkv_width, config.hidden))
        self.out = nn.Parameter(torch.empty(config.hidden, config.heads * config.head_dim))
        self.ffn: DenseFfn | MoeFfn = MoeFfn(config) if config.is_moe else DenseFfn(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, hidden] from position 0, causal."""
        c = self.config
        qkv = F.linear(self.norm_attention(x), self.qkv).view(*x.shape[:-1], -1, c.head_dim)
        q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], -2)
        q, k = rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        repeat = c.heads // c.kv_heads
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.repeat_interleave(repeat, 1),
            v.repeat_interleave(repeat, 1),
            is_causal=True,
        )
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.out)
        mixed: Tensor = self.ffn(self.norm_ffn(x))
        return x + mixed


class Qwen3(nn.Module):
    """A decoder-only language model. Parameters are uninitialised until weights are loaded."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.rms_eps)
        self.head = nn.Parameter(torch.empty(config.vocab, config.hidden))
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        frequency = 1.0 / config.rope_theta**half  # in fp32 and in this order, as transformers rounds it
        angle = torch.arange(config.max_positions).float()[:, None] * frequency
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)  # [positions, 1, d/2]
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    @property
    def layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, vocab] for right-padded ids [B, T]; causal, positions from 0."""
        length = ids.shape[1]
        x = F.embedding(ids, self.embedding)
        for block in self.layers:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.head)

    def aux_loss(self) -> Tensor:
        """Sum over layers of the last forward's load-balancing loss (0 for a dense model)."""
        total = self.embedding.new_zeros(())
        for block in self.layers:
            if isinstance(block.ffn, MoeFfn) and block.ffn.aux is not None:
                total = total + block.ffn.aux
        return total

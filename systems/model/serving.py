"""The serving form of a Qwen3: the same function as `qwen3.py`, in fp64 and with fewer operators.

A step of a tiny model costs its operators, not its arithmetic, so what can be computed once is folded:

* norm weights before a projection are multiplied into that projection
* the q/k norm weights, the rotation and the 1/sqrt(d) of attention become one table by position
* q, k and v are normalised, rotated and cached together; residuals are added by the projection's GEMM

The folded model equals the plain one up to rounding (tested). What a row gets does not depend on its
batch: see the invariants in `qwen3.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from systems.model.config import ModelConfig
from systems.model.qwen3 import Block, MoeFfn, Qwen3
from systems.model.weights import load_standard

Cache = list[Tensor]  # per layer [2 (keys, values), slots, kv_heads, positions, head_dim]


class _Layer:
    """One decoder layer with folded weights."""

    def __init__(self, block: Block) -> None:
        self.config = block.config
        attention, ffn = block.norm_attention.weight, block.norm_ffn.weight
        self.qkv = block.qkv * attention
        self.out = block.out.t().contiguous()
        self.router: Tensor | None = None
        self.gate_up = block.ffn.gate_up * ffn
        self.down = block.ffn.down.transpose(-1, -2).contiguous()
        if isinstance(block.ffn, MoeFfn):
            self.router = block.ffn.router * ffn

    def feed_forward(self, x: Tensor) -> Tensor:
        """x + FFN(norm(x)) for rows [N, hidden]."""
        normed = F.rms_norm(x, x.shape[-1:], None, self.config.rms_eps)
        if self.router is None:
            gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
            return torch.addmm(x, F.silu(gate).mul_(up), self.down)
        return x + self._experts(normed, self.router)

    def _experts(self, x: Tensor, router: Tensor) -> Tensor:
        k = self.config.experts_per_token
        weight, expert = F.linear(x, router).softmax(-1).topk(k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        rows = x[order // k]
        outputs = []
        start = 0
        for index, count in enumerate(torch.bincount(flat, minlength=len(router)).tolist()):
            if count:
                gate, up = F.linear(rows[start : start + count], self.gate_up[index]).chunk(2, -1)
                outputs.append(F.silu(gate).mul_(up) @ self.down[index])
            start += count
        slots = torch.empty_like(rows).index_copy_(0, order, torch.cat(outputs))
        return (slots.view(-1, k, x.shape[-1]) * weight.unsqueeze(-1)).sum(1)


class ServingModel:
    """A frozen policy or judge that prefills and decodes."""

    @torch.no_grad()
    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
        model = load_standard(Qwen3(config).double(), state)
        self.config = config
        self.embedding = model.embedding.detach()
        self.head = (model.head * model.norm.weight).detach()
        self.layers = [_Layer(block) for block in model.layers]
        for layer in self.layers:
            for name, value in vars(layer).items():
                if isinstance(value, Tensor):
                    setattr(layer, name, value.detach())
        self._direct, self._swapped = _tables(model)

    def new_cache(self, slots: int, positions: int) -> Cache:
        """Zeros, because masked slots are multiplied by 0 and must be finite."""
        config = self.config
        shape = (2, slots, config.kv_heads, positions, config.head_dim)
        return [torch.zeros(shape, dtype=torch.float64) for _ in self.layers]

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Cache]:
        """Logits [B, vocab] after each row's last token, and its cache, of T positions."""
        config = self.config
        batch, width = ids.shape
        heads, groups, size = config.heads, config.kv_heads, config.head_dim
        x = F.embedding(ids, self.embedding).view(batch * width, -1)
        direct, swapped = self._direct[:width], self._swapped[:width]
        caches = []
        for index, layer in enumerate(self.layers):
            qkv = self._project(x, layer).view(batch, width, -1, size)
            qk = self._rotate(qkv[:, :, : heads + groups], direct[:, index], swapped[:, index])
            q, k = qk[:, :, :heads].transpose(1, 2), qk[:, :, heads:].transpose(1, 2)
            v = qkv[:, :, heads + groups :].transpose(1, 2)
            caches.append(torch.stack([k, v]))
            shared = caches[-1].repeat_interleave(heads // groups, 2)
            attended = F.scaled_dot_product_attention(q, shared[0], shared[1], is_causal=True, scale=1.0)
            x = torch.addmm(x, attended.transpose(1, 2).reshape(batch * width, -1), layer.out)
            x = layer.feed_forward(x)
        last = x.view(batch, width, -1)[torch.arange(batch), lengths - 1]
        return self._logits(last), caches

    def decode(self, ids: Tensor, position: Tensor, cache: Cache, span: int) -> Tensor:
        """Logits [B, vocab] for one new token a row at `position` [B]; rows are slots 0..B-1.

        Writes the tokens' keys and values into `cache` and attends to its first `span` positions.
        """
        config = self.config
        batch = len(ids)
        heads, groups, size = config.heads, config.kv_heads, config.head_dim
        rows = torch.arange(batch)
        x = F.embedding(ids, self.embedding)
        direct, swapped = self._direct[position], self._swapped[position]
        ahead = torch.arange(span) > position.repeat_interleave(groups)[:, None]
        bias = torch.zeros(ahead.shape, dtype=torch.float64).masked_fill_(ahead, -torch.inf)[:, None]
        for index, layer in enumerate(self.layers):
            qkv = self._project(x, layer).view(batch, -1, size)
            qk = self._rotate(qkv[:, : heads + groups], direct[:, index], swapped[:, index])
            stored = cache[index]
            fresh = torch.cat([qk[:, heads:], qkv[:, heads + groups :]], 1)
            stored[:, rows, :, position] = fresh.view(batch, 2, groups, size)
            keys, values = stored[:, :batch, :, :span].flatten(1, 2)
            q = qk[:, :heads].reshape(batch * groups, -1, size)
            weights = torch.baddbmm(bias, q, keys.transpose(1, 2)).softmax(-1)
            x = torch.addmm(x, torch.bmm(weights, values).view(batch, -1), layer.out)
            x = layer.feed_forward(x)
        return self._logits(x)

    def _project(self, x: Tensor, layer: _Layer) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], None, self.config.rms_eps), layer.qkv)

    def _rotate(self, qk: Tensor, direct: Tensor, swapped: Tensor) -> Tensor:
        """Normalise and rotate q and k heads [..., heads + kv_heads, d] with the folded tables."""
        normed = F.rms_norm(qk, qk.shape[-1:], None, self.config.rms_eps)
        return torch.addcmul(normed * direct, normed.roll(self.config.head_dim // 2, -1), swapped)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], None, self.config.rms_eps), self.head)


def _tables(model: Qwen3) -> tuple[Tensor, Tensor]:
    """Tables [positions, layers, heads + kv_heads, d] with which x is normalised q or k:

    rotated = x * direct + roll(x, d/2) * swapped, with norm weights and q's 1/sqrt(d) inside.
    """
    config = model.config
    cos, sin = torch.cat([model.cos, model.cos], -1), torch.cat([-model.sin, model.sin], -1)
    direct, swapped = [], []
    for block in model.layers:
        q, k = block.norm_q.weight / math.sqrt(config.head_dim), block.norm_k.weight
        weight = torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])
        direct.append(cos * weight)
        swapped.append(sin * weight.roll(config.head_dim // 2, -1))
    return torch.stack(direct, 1).detach(), torch.stack(swapped, 1).detach()

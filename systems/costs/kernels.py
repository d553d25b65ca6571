"""How long one GPU kernel takes: a handful of coefficients a kernel, fitted to public measurements.

    smooth(c, m)      (c^r + m^r)^(1/r): near the larger of computing and reading, more where they are alike
    GEMM              t0 + smooth(2MNK / (F*ec), bytes / (BW*em))
    prefill attention t0 + smooth(causal FLOPs / (F*ec), bytes / (BW*em))
    decode attention  t0 + B * (c1*heads + c2*KV heads) + KV bytes / (BW*em) * (1 + g / (B * KV heads)), where
                      reading is not faster than computing on it with queries padded to a tile of 64
    experts           t0 + smooth(FLOPs / (F*ec), bytes of the distinct experts hit / (BW*em))
                      + u * bytes of all token-expert pairs / BW: they are permuted, weighted and summed
    all-reduce        NVLink: one-shot a + (n-1)*S/b1 or two-shot a + h + 2(n-1)/n*S/b2, whichever is less, up
                      to 8 MiB; NCCL's c + 2(n-1)/n*S/b3 beyond. Without NVLink: d + 2(n-1)/n*S/b4

F is the device's bf16 rate, BW its memory bandwidth. Efficiencies (ec, em) and constants were measured on an
H100 (`kernels.toml`); on another device they are taken to be the same, which is an extrapolation.
All functions take arrays as well as numbers, and give seconds.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from systems.costs.hardware import Hardware

HERE = Path(__file__).parent
BYTES = 2  # of a bf16 value
TILE = (
    64  # queries to which decode attention pads those of a KV head: as many FLOPs a byte of keys and values
)
CUSTOM_LIMIT_BYTES = 8 * 2**20  # vLLM's own all-reduce is used below this size

Array: TypeAlias = NDArray[np.float64] | float


@dataclass(frozen=True, slots=True)
class Roofline:
    """t0 + smooth(FLOPs / (F*ec), bytes / (BW*em)) with sharpness r."""

    t0_s: float
    compute: float  # ec: share of the peak rate
    memory: float  # em: share of the peak bandwidth
    sharpness: float  # r

    def seconds(self, flops: Array, moved: Array, hardware: Hardware) -> Any:
        compute = np.asarray(flops, dtype=np.float64) / (hardware.bf16_flops * self.compute)
        memory = np.asarray(moved, dtype=np.float64) / (hardware.memory_bytes_per_s * self.memory)
        return self.t0_s + smooth(compute, memory, self.sharpness)


def smooth(first: Any, second: Any, r: float) -> Any:
    """(first^r + second^r)^(1/r), scaled by the larger one so that tiny numbers do not underflow."""
    larger = np.maximum(first, second)
    ratio = np.minimum(first, second) / np.maximum(larger, 1e-300)
    return larger * (1.0 + ratio**r) ** (1.0 / r)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """See the module."""

    t0_s: float
    head_s: float  # c1: a sequence and query head
    kv_head_s: float  # c2: a sequence and KV head, which is a thread block or more
    memory: float  # em
    lone: float  # g: how much worse a few long contexts are read than many

    def seconds(self, batch: Array, kv_tokens: Array, heads: Array, kv_heads: Array, head_dim: int,
                hardware: Hardware, compute: float) -> Any:  # fmt: skip
        """`kv_tokens` are the context tokens of all `batch` sequences; `compute` is the share of the peak
        rate that attention reaches."""
        moved = np.asarray(kv_tokens, dtype=np.float64) * 2 * kv_heads * head_dim * BYTES
        alone = 1.0 + self.lone / np.maximum(np.asarray(batch) * kv_heads, 1.0)
        byte_s = max(
            1.0 / (hardware.memory_bytes_per_s * self.memory), TILE / (hardware.bf16_flops * compute)
        )
        return (
            self.t0_s
            + np.asarray(batch) * (self.head_s * heads + self.kv_head_s * kv_heads)
            + moved * byte_s * alone
        )


@dataclass(frozen=True, slots=True)
class Experts:
    """See the module."""

    t0_s: float
    compute: float  # ec
    memory: float  # em
    sharpness: float  # r
    routing: float  # u: how often the hidden state of a token-expert pair goes through memory

    def seconds(self, flops: Array, weights: Array, routed: Array, hardware: Hardware) -> Any:
        compute = np.asarray(flops, dtype=np.float64) / (hardware.bf16_flops * self.compute)
        memory = np.asarray(weights, dtype=np.float64) / (hardware.memory_bytes_per_s * self.memory)
        moved = np.asarray(routed) * self.routing / hardware.memory_bytes_per_s
        return self.t0_s + smooth(compute, memory, self.sharpness) + moved


@dataclass(frozen=True, slots=True)
class AllReduce:
    """See the module. Bandwidths are shares of one direction of NVLink, or of PCIe."""

    base_s: float  # a
    log_s: float  # more for each doubling of devices
    one_shot: float  # b1
    two_shot: float  # b2
    second_s: float  # h
    nccl_s: float  # c
    nccl_log_s: float
    nccl: float  # b3
    pcie_s: float  # d
    pcie: float  # b4

    def seconds(self, size: Array, devices: Array, hardware: Hardware) -> Any:
        """`size` bytes on each of `devices`; 0 on one device."""
        size, n = np.asarray(size, dtype=np.float64), np.asarray(devices, dtype=np.float64)
        share = 2 * (n - 1) / np.maximum(n, 1) * size
        if not hardware.nvlink_bytes_per_s:
            slow = self.pcie_s + share / (hardware.pcie_bytes_per_s * self.pcie)
            return np.where(n > 1, slow, 0.0)
        link, doublings = hardware.nvlink_bytes_per_s, np.log2(np.maximum(n, 1))
        ring = share / link
        custom = (
            self.base_s
            + self.log_s * doublings
            + np.minimum((n - 1) * size / (link * self.one_shot), self.second_s + ring / self.two_shot)
        )
        nccl = self.nccl_s + self.nccl_log_s * doublings + ring / self.nccl
        return np.where(n > 1, np.where(size < CUSTOM_LIMIT_BYTES, custom, nccl), 0.0)


@dataclass(frozen=True)
class Kernels:
    """All kernels of one device type."""

    hardware: Hardware
    gemm: Roofline
    prefill_attention: Roofline
    decode_attention: DecodeAttention
    experts: Experts
    all_reduce: AllReduce

    def gemm_s(self, m: Array, n: Array, k: Array) -> Any:
        """[m, k] x [k, n]."""
        m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
        return self.gemm.seconds(2 * m * n * k, BYTES * (m * n + m * k + n * k), self.hardware)

    def prefill_attention_s(
        self, pairs: Array, queries: Array, context: Array, heads: Array, kv_heads: Array, head_dim: int
    ) -> Any:
        """`queries` new tokens that attend to `pairs` (query, key) pairs, over `context` keys to be read."""
        flops = 4.0 * np.asarray(pairs, dtype=np.float64) * heads * head_dim
        moved = BYTES * head_dim * (2.0 * np.asarray(queries) * heads + 2.0 * np.asarray(context) * kv_heads)
        return self.prefill_attention.seconds(flops, moved, self.hardware)

    def decode_attention_s(
        self, batch: Array, kv_tokens: Array, heads: Array, kv_heads: Array, head_dim: int
    ) -> Any:
        compute = self.prefill_attention.compute
        return self.decode_attention.seconds(
            batch, kv_tokens, heads, kv_heads, head_dim, self.hardware, compute
        )

    def experts_s(
        self, tokens: Array, distinct: Array, per_token: Array, hidden: Array, width: Array,
        devices: Array = 1,
    ) -> Any:  # fmt: skip
        """`tokens` tokens choose `per_token` experts each, `distinct` of those on this device are hit.

        Experts of `width` are spread over `devices` (expert parallel); every device routes all tokens.
        """
        pairs = np.asarray(tokens, dtype=np.float64) * per_token
        flops = 6.0 * pairs / devices * hidden * width
        weights = BYTES * 3.0 * np.asarray(distinct) * hidden * width
        return self.experts.seconds(flops, weights, BYTES * pairs * hidden, self.hardware)

    def all_reduce_s(self, size: Array, devices: Array) -> Any:
        return self.all_reduce.seconds(size, devices, self.hardware)


FORMS = {
    "gemm": Roofline,
    "prefill_attention": Roofline,
    "decode_attention": DecodeAttention,
    "experts": Experts,
    "all_reduce": AllReduce,
}


@cache
def coefficients() -> dict[str, Any]:
    """The fitted kernels of `kernels.toml`, by name."""
    raw = tomllib.loads((HERE / "kernels.toml").read_text())
    return {
        name: form(**{field.name: raw[name][field.name] for field in fields(form)})
        for name, form in FORMS.items()
    }


def kernels_of(hardware: Hardware) -> Kernels:
    return Kernels(hardware, **coefficients())

"""How long one GPU kernel takes: a handful of coefficients a kernel, fitted to public measurements.

    smooth(c, m)      (c^r + m^r)^(1/r): near the larger of computing and reading, more where they are alike
    GEMM              t0 + k*K + smooth(q * 2MN(K + p) / (F*ec), bytes / (BW*em)): a walk along K has a
                      latency and a prologue; q is for tiles that do not fill the last wave of multiprocessors
    prefill attention t0 + smooth(causal FLOPs / (F*ec), bytes / (BW*em)) + u * thread blocks
    decode attention  t0 + B * (c1*heads + c2*KV heads) + KV bytes / (BW*em) * (1 + g / (B * KV heads)), where
                      reading is not faster than computing on it with queries padded to a tile of 64
    experts           t0 + smooth(FLOPs / (F*ec), bytes of the distinct experts hit / (BW*em))
                      + u * bytes of all token-expert pairs / BW: they are permuted, weighted and summed
    all-reduce        NVLink: one-shot a + (n-1)*S/b1 or two-shot a + h + 2(n-1)/n*S/b2, whichever is less, up
                      to 8 MiB; NCCL's c + 2(n-1)/n*S/b3 beyond. Without NVLink: d + 2(n-1)/n*S/b4
    linear attention  prefill: t0 + smooth(heads * (tokens*c + sequences*s), longest * w), because a sequence
    is
                      walked along; decode: smooth(heads * sequences*d, b)

F is the device's bf16 rate, BW its memory bandwidth. `kernels.toml` has the efficiencies (ec, em) and
constants of each device that public tables exist of; on another device, those of an H100 are taken, which is
a transfer. All functions take arrays as well as numbers, and give seconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from systems.costs.hardware import MEASURED_ON, Hardware, load_hardware

HERE = Path(__file__).parent
BYTES = 2  # of a bf16 value
TILE = (
    64  # queries to which decode attention pads those of a KV head: as many FLOPs a byte of keys and values
)
GEMM_TILE = (128, 256)  # rows and columns of the result that one multiprocessor computes at a time
QUERY_TILE = 128  # queries of a thread block of prefill attention
STATE = 128 * 128  # of the heads that linear attention was measured with
CUSTOM_LIMIT_BYTES = 8 * 2**20  # vLLM's own all-reduce is used below this size

Array: TypeAlias = NDArray[np.float64] | float


@dataclass(frozen=True, slots=True)
class Gemm:
    """See the module."""

    t0_s: float
    k_s: float  # k: latency of one step along the reduced dimension
    compute: float  # ec: share of the peak rate
    memory: float  # em: share of the peak bandwidth
    sharpness: float  # r
    prologue: float  # p: steps of the reduced dimension that starting and ending a tile is worth
    quantum: float  # power of how much longer the waves are than the tiles fill
    output: float  # of the result, how much goes through memory

    def seconds(self, m: Array, n: Array, k: Array, hardware: Hardware) -> Any:
        m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
        waves = np.ceil(m / GEMM_TILE[0]) * np.ceil(n / GEMM_TILE[1]) / hardware.multiprocessors
        unfilled = np.where(waves > 1, np.ceil(waves) / np.maximum(waves, 1e-9), 1.0) ** self.quantum
        compute = unfilled * 2 * m * n * (k + self.prologue) / (hardware.bf16_flops * self.compute)
        moved = BYTES * (self.output * m * n + m * k + n * k)
        memory = moved / (hardware.memory_bytes_per_s * self.memory)
        return self.t0_s + self.k_s * k + smooth(compute, memory, self.sharpness)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """See the module."""

    t0_s: float
    compute: float  # ec
    memory: float  # em
    sharpness: float  # r
    block_s: float  # u: a query head's tile of 128 queries

    def seconds(self, flops: Array, moved: Array, blocks: Array, hardware: Hardware) -> Any:
        compute = np.asarray(flops, dtype=np.float64) / (hardware.bf16_flops * self.compute)
        memory = np.asarray(moved, dtype=np.float64) / (hardware.memory_bytes_per_s * self.memory)
        return self.t0_s + smooth(compute, memory, self.sharpness) + np.asarray(blocks) * self.block_s


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
class LinearAttention:
    """See the module. Work is of heads with a state of 128 x 128; others count by the size of theirs."""

    t0_s: float
    token_s: float  # c
    sequence_s: float  # s
    walk_s: float  # w: a token of the longest sequence
    sharpness: float
    decode_s: float  # d
    decode_least_s: float  # b
    decode_sharpness: float

    def prefill(self, heads: Array, tokens: Array, sequences: Array, longest: Array) -> Any:
        work = np.asarray(heads) * (
            np.asarray(tokens) * self.token_s + np.asarray(sequences) * self.sequence_s
        )
        return self.t0_s + smooth(work, np.asarray(longest) * self.walk_s, self.sharpness)

    def decode(self, heads: Array, sequences: Array) -> Any:
        work = np.asarray(heads, dtype=np.float64) * np.asarray(sequences) * self.decode_s
        return smooth(work, np.full_like(work, self.decode_least_s), self.decode_sharpness)


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
    gemm: Gemm
    prefill_attention: PrefillAttention
    decode_attention: DecodeAttention
    experts: Experts
    all_reduce: AllReduce
    linear_attention: LinearAttention
    slower: Mapping[str, float] = field(default_factory=dict)  # factors on seconds, by kernel

    def scaled(self, factors: Mapping[str, float]) -> Kernels:
        """Every kernel that `factors` names takes so many times as long."""
        slower = {name: self.factor(name) * factors.get(name, 1.0) for name in FORMS}
        return replace(self, slower=slower)

    def factor(self, kernel: str) -> float:
        """How many times as long as its coefficients say."""
        return self.slower.get(kernel, 1.0)

    def gemm_s(self, m: Array, n: Array, k: Array) -> Any:
        """[m, k] x [k, n]."""
        return self.gemm.seconds(m, n, k, self.hardware) * self.factor("gemm")

    def prefill_attention_s(
        self, pairs: Array, queries: Array, context: Array, heads: Array, kv_heads: Array, head_dim: int,
        sequences: Array = 1,
    ) -> Any:  # fmt: skip
        """`queries` new tokens of `sequences` sequences that attend to `pairs` (query, key) pairs, over
        `context` keys to be read."""
        flops = 4.0 * np.asarray(pairs, dtype=np.float64) * heads * head_dim
        moved = BYTES * head_dim * (2.0 * np.asarray(queries) * heads + 2.0 * np.asarray(context) * kv_heads)
        tiles = np.asarray(sequences) * np.ceil(np.asarray(queries) / np.asarray(sequences) / QUERY_TILE)
        seconds = self.prefill_attention.seconds(flops, moved, tiles * heads, self.hardware)
        return seconds * self.factor("prefill_attention")

    def decode_attention_s(
        self, batch: Array, kv_tokens: Array, heads: Array, kv_heads: Array, head_dim: int
    ) -> Any:
        compute = self.prefill_attention.compute
        seconds = self.decode_attention.seconds(
            batch, kv_tokens, heads, kv_heads, head_dim, self.hardware, compute
        )
        return seconds * self.factor("decode_attention")

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
        seconds = self.experts.seconds(flops, weights, BYTES * pairs * hidden, self.hardware)
        return seconds * self.factor("experts")

    def all_reduce_s(self, size: Array, devices: Array) -> Any:
        return self.all_reduce.seconds(size, devices, self.hardware) * self.factor("all_reduce")

    def linear_prefill_s(self, heads: Array, tokens: Array, sequences: Array, longest: Array) -> Any:
        """`tokens` new tokens of `sequences` sequences, of which the longest has `longest`."""
        seconds = self.linear_attention.prefill(heads, tokens, sequences, longest)
        return seconds * self.factor("linear_attention")

    def linear_decode_s(self, heads: Array, sequences: Array) -> Any:
        """One token of each of `sequences`. Measured on an H100; it takes longer where memory is slower."""
        slower = load_hardware(MEASURED_ON).memory_bytes_per_s / self.hardware.memory_bytes_per_s
        return self.linear_attention.decode(heads, sequences) * slower * self.factor("linear_attention")


FORMS = {
    "gemm": Gemm,
    "prefill_attention": PrefillAttention,
    "decode_attention": DecodeAttention,
    "experts": Experts,
    "all_reduce": AllReduce,
    "linear_attention": LinearAttention,
}


@cache
def fitted() -> dict[str, dict[str, Any]]:
    """The fitted kernels of `kernels.toml`, by device and name; only of devices that have a table."""
    raw = tomllib.loads((HERE / "kernels.toml").read_text())
    return {
        device: {
            name: FORMS[name](**{one.name: table[one.name] for one in fields(FORMS[name])})
            for name, table in tables.items()
        }
        for device, tables in raw.items()
    }


def measured_on(kernel: str, device: str) -> str:
    """The device whose table a kernel's coefficients on `device` come from."""
    return device if kernel in fitted().get(device, {}) else MEASURED_ON


def kernels_of(hardware: Hardware) -> Kernels:
    """Its own coefficients where there are any, else those of an H100."""
    return Kernels(hardware, **{name: fitted()[measured_on(name, hardware.name)][name] for name in FORMS})

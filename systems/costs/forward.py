"""One forward pass of a model on a replica: kernels, layer by layer, and the engine's host work around them.

    decode step of n sequences with KV context tokens in all   alpha[n] + beta[n] * KV
    step that also reads new tokens in                         one mixed step, never the sum of two

The host layer is what an engine adds to its kernels: a constant a step, so much a layer (launches and small
kernels), so much a sequence (scheduling, sampling), and a factor on prefill kernels.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from systems.costs.architecture import Architecture, distinct_experts
from systems.costs.durations import Costs
from systems.costs.kernels import BYTES, QUERY_TILE, STATE, Array, Kernels
from systems.costs.memory import GIB

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine adds to its kernels, in seconds; `prefill` is a factor."""

    step_s: float
    layer_s: float
    sequence_s: float
    prefill: float

    def scaled(self, factor: float) -> Host:
        """All seconds `factor` times as long."""
        return Host(self.step_s * factor, self.layer_s * factor, self.sequence_s * factor, self.prefill)


@dataclass(frozen=True, slots=True)
class Engine:
    """A version of a serving engine: its host layer, and what it takes of a device's memory."""

    name: str
    host: Host
    sampler: float  # values a sequence and word of the vocabulary in its dummy run, see `memory.py`
    graphs_bytes: float
    about: str


@cache
def engines() -> dict[str, Engine]:
    """Fitted engines by name, from `engines.toml`."""
    raw = tomllib.loads((HERE / "engines.toml").read_text())
    return {
        name: Engine(
            name, Host(**{key: table[key] for key in Host.__slots__}),
            table["sampler"], table["graphs_gib"] * GIB, table["about"],
        )
        for name, table in raw.items()
    }  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """`architecture` sharded over `tp` devices.

    With `expert_ranks` > 1 so many replicas work in step and share their experts out (data parallel
    attention, expert parallel feed-forward): each routes the tokens of all and holds a part of the experts.
    """

    architecture: Architecture
    kernels: Kernels
    host: Host
    tp: int
    expert_ranks: int = 1
    routing_skew: float = 0.0  # of experts' popularity, see `distinct_experts`

    def decode_s(self, sequences: Array, kv_tokens: Array) -> Any:
        """One token for each of `sequences`."""
        arch = self.architecture
        attention = arch.full_layers * self._decode_attention_s(sequences, kv_tokens)
        return self.fixed_s(sequences) + self.body_s(sequences) + attention

    def mixed_s(self, sequences: int, kv_tokens: float, queries: int, pairs: float, context: float,
                starting: int) -> float:  # fmt: skip
        """A step that decodes `sequences` and reads in `queries` new tokens.

        These attend to `pairs` (query, key) pairs over `context` keys; `starting` prompts end in it, and
        are sampled from.
        """
        arch, host = self.architecture, self.host
        prefill = self.kernels.prefill_attention_s(pairs, queries, context, *self.head_split, arch.head_dim)
        attention = prefill * host.prefill
        linear = self.linear_prefill_s(queries, starting) * host.prefill
        alone = 0.0
        if sequences:
            attention = attention + self._decode_attention_s(sequences, kv_tokens)
            alone = self.body_s(sequences)
        read = (self.body_s(sequences + queries) - alone) * host.prefill
        fixed = self.fixed_s(sequences + starting)
        return float(fixed + alone + read + arch.full_layers * attention + linear)

    def tables(self, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """alpha[n] and beta[n] for n = 0..most; entry 0 is not used."""
        n = np.arange(1, most + 1, dtype=np.float64)
        alpha = self.decode_s(n, 0.0)
        beta = self.decode_s(n, 1e6) - alpha
        return np.concatenate([[0.0], alpha]), np.concatenate([[0.0], beta / 1e6])

    def _host_s(self, sequences: Array) -> Any:
        host = self.host
        return host.step_s + host.layer_s * self.architecture.layers + host.sequence_s * np.asarray(sequences)

    def fixed_s(self, sampled: Array) -> Any:
        """What a step takes for the sequences that it samples from: host, states, logits."""
        return self._host_s(sampled) + self.state_s(sampled) + self.head_s(sampled)

    def decode_attention_alone_s(self, sequences: Array) -> Any:
        """All layers' decode attention without reading a cache."""
        return self.architecture.full_layers * self._decode_attention_s(sequences, 0.0)

    @cached_property
    def head_split(self) -> tuple[int, int]:
        """Query and KV heads on a device; KV heads are replicated when there are fewer than devices."""
        arch = self.architecture
        return -(-arch.heads // self.tp), max(1, arch.kv_heads // self.tp)

    @cached_property
    def _prefill_terms(self) -> tuple[float, float, float, float, float, float, float]:
        """All layers' prefill attention: seconds a launch, a pair, a query, a context token and a tile of
        queries; the sharpness, and the tile."""
        arch, kernel, hardware = self.architecture, self.kernels.prefill_attention, self.kernels.hardware
        heads, kv_heads = self.head_split
        times = arch.full_layers * self.kernels.factor("prefill_attention")
        byte_s = times * BYTES * arch.head_dim * 2.0 / (hardware.memory_bytes_per_s * kernel.memory)
        pair_s = times * 4.0 * heads * arch.head_dim / (hardware.bf16_flops * kernel.compute)
        return (
            times * kernel.t0_s, pair_s, byte_s * heads, byte_s * kv_heads, times * heads * kernel.block_s,
            kernel.sharpness, float(QUERY_TILE),
        )  # fmt: skip

    def prefill_attention_fast_s(self, pairs: float, queries: float, context: float) -> float:
        """All layers' prefill attention, in plain arithmetic."""
        launch_s, pair_s, query_s, context_s, tile_s, r, tile = self._prefill_terms
        compute, memory = pairs * pair_s, queries * query_s + context * context_s
        larger, smaller = (compute, memory) if compute > memory else (memory, compute)
        fixed: float = launch_s + tile_s * -(-queries // tile)
        if larger <= 0.0:
            return fixed
        sharpened: float = (1.0 + (smaller / larger) ** r) ** (1.0 / r)
        return fixed + larger * sharpened

    @cached_property
    def linear_heads(self) -> float:
        """Value heads of linear attention on a device, counted by the size of their state."""
        arch = self.architecture
        own = max(1, arch.linear_value_heads // self.tp)
        return own * arch.linear_key_dim * arch.linear_value_dim / STATE

    @cached_property
    def _linear_terms(self) -> tuple[float, float, float, float, float]:
        """All layers' linear attention: seconds a launch, a token, a prompt, a token of the longest prompt;
        the sharpness."""
        kernel, heads = self.kernels.linear_attention, self.linear_heads
        times = self.architecture.linear_layers * self.kernels.factor("linear_attention")
        return (
            times * kernel.t0_s, times * heads * kernel.token_s, times * heads * kernel.sequence_s,
            times * kernel.walk_s, kernel.sharpness,
        )  # fmt: skip

    def linear_prefill_s(self, queries: float, starting: int) -> float:
        """All layers' linear attention over new tokens; how they divide among the prompts that end in this
        step and one more is not known, and taken to be even."""
        if not self.architecture.linear_layers:
            return 0.0
        launch_s, token_s, prompt_s, walk_s, r = self._linear_terms
        prompts = starting if starting > 1 else 1
        work, walk = queries * token_s + prompts * prompt_s, queries / prompts * walk_s
        larger, smaller = (work, walk) if work > walk else (walk, work)
        sharpened: float = (1.0 + (smaller / larger) ** r) ** (1.0 / r) if larger > 0.0 else 0.0
        return launch_s + larger * sharpened

    def _decode_attention_s(self, sequences: Array, kv_tokens: Array) -> Any:
        heads, kv_heads = self.head_split
        return self.kernels.decode_attention_s(
            sequences, kv_tokens, heads, kv_heads, self.architecture.head_dim
        )

    def body_s(self, tokens: Array) -> Any:
        """All layers but attention itself and states, for `tokens` tokens."""
        arch, k, tp = self.architecture, self.kernels, self.tp
        hidden = arch.hidden
        total = arch.full_layers * (
            k.gemm_s(tokens, arch.qkv_width / tp, hidden)
            + k.gemm_s(tokens, hidden, arch.heads * arch.head_dim / tp)
        )
        if arch.linear_layers:
            total = total + arch.linear_layers * (
                k.gemm_s(tokens, arch.linear_in_width / tp, hidden)
                + k.gemm_s(tokens, hidden, arch.linear_values / tp)
            )
        if arch.ffn_layers:
            total = total + arch.ffn_layers * self._dense_s(tokens, arch.ffn)
        if arch.moe_layers:
            total = total + arch.moe_layers * self._experts_s(tokens)
        return total + 2 * arch.layers * k.all_reduce_s(np.asarray(tokens) * hidden * BYTES, tp)

    def head_s(self, sampled: Array) -> Any:
        """Logits of `sampled` sequences."""
        arch = self.architecture
        return self.kernels.gemm_s(sampled, arch.vocab / self.tp, arch.hidden)

    def state_s(self, sequences: Array) -> Any:
        """Linear attention reads and writes the state of each sequence, in every layer that has one."""
        arch, sampled = self.architecture, np.asarray(sequences, dtype=np.float64)
        if not arch.linear_layers:
            return np.zeros_like(sampled)
        each = self.kernels.linear_decode_s(self.linear_heads, sampled)
        return np.where(sampled > 0, arch.linear_layers * each, 0.0)

    def _dense_s(self, tokens: Array, width: int) -> Any:
        k, hidden, part = self.kernels, self.architecture.hidden, width / self.tp
        into = self.architecture.ffn_matrices - 1
        return k.gemm_s(tokens, into * part, hidden) + k.gemm_s(tokens, hidden, part)

    def _experts_s(self, tokens: Array) -> Any:
        """Experts are cut like any matrix (tensor parallel); real routing hits fewer than it could."""
        arch, k, ranks = self.architecture, self.kernels, self.expert_ranks
        routed_tokens = np.asarray(tokens) * ranks
        hit = distinct_experts(arch.experts, arch.experts_per_token, routed_tokens, self.routing_skew) / ranks
        width = arch.expert_ffn / self.tp
        routed = k.experts_s(routed_tokens, hit, arch.experts_per_token, arch.hidden, width, ranks)
        exchanged = k.all_reduce_s(routed_tokens * arch.hidden * BYTES, ranks)
        shared = self._dense_s(tokens, arch.shared_ffn) if arch.shared_ffn else 0.0
        return routed + exchanged + shared + k.gemm_s(tokens, arch.experts, arch.hidden)


class StepTables:
    """A `Forward` as tables: a simulation asks a hundred thousand times what a step takes."""

    def __init__(self, forward: Forward, max_running: int, token_budget: int) -> None:
        self._forward = forward
        self._hybrid = forward.architecture.linear_layers > 0
        alpha, beta = forward.tables(max_running)
        self.alpha: list[float] = alpha.tolist()
        self.beta: list[float] = beta.tolist()
        tokens = np.arange(1, token_budget + max_running + 1, dtype=np.float64)
        self._body: list[float] = [0.0, *forward.body_s(tokens).tolist()]
        sampled = np.arange(0, 2 * max_running + 1, dtype=np.float64)
        self._fixed: list[float] = forward.fixed_s(sampled).tolist()
        each = np.arange(1, max_running + 1, dtype=np.float64)
        self._decode: list[float] = forward.decode_attention_alone_s(each).tolist()

    def costs(self) -> Costs:
        return Costs(self.alpha.__getitem__, self.beta.__getitem__, self.mixed_s)

    def prices(self, spared: float) -> tuple[float, float]:
        """Seconds of a generated and of a read token such that no step costs less than what is in it.

        A generated token costs the share `spared` less than in the best pure decode step; what is left over
        in every mixed step is then at least the price of what it reads.
        """
        alpha = np.asarray(self.alpha[1:])
        counts = np.arange(len(self.alpha), dtype=np.float64)
        generated = float((alpha / counts[1:]).min()) * (1 - spared)
        body, prefill = np.asarray(self._body), self._forward.host.prefill
        queries = np.arange(1, len(body) - len(self.alpha) + 1)
        decode = np.asarray([0.0, *self._decode])
        read = np.inf
        for n in range(len(self.alpha)):
            step = self._fixed[n] + body[n] + (body[n + queries] - body[n]) * prefill + decode[n]
            read = min(read, float(((step - generated * n) / queries).min()))
        return generated, max(0.0, read)

    def mixed_s(
        self, sequences: int, kv_tokens: float, queries: int, pairs: float, context: float, starting: int
    ) -> float:
        """As `Forward.mixed_s`, by looking up all that depends on counts."""
        forward, prefill = self._forward, self._forward.host.prefill
        body, alone = self._body[sequences + queries], self._body[sequences]
        attention = forward.prefill_attention_fast_s(pairs, queries, context) * prefill
        decode = self._decode[sequences - 1] + self.beta[sequences] * kv_tokens if sequences else 0.0
        linear = forward.linear_prefill_s(queries, starting) * prefill
        return (
            self._fixed[sequences + starting] + alone + (body - alone) * prefill + attention + linear + decode
        )

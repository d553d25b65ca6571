"""What the simulated cluster asks a cost model. Durations are seconds, tokens the workload's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from systems.types import Role, Shift, Speed, Step

BLOCK = 16  # tokens of a KV block


class Costs(NamedTuple):
    """Durations of steps; `mixed_s` of (decoding, their KV tokens, new tokens, pairs, context, starting)."""

    alpha_s: Callable[[int], float]
    beta_s: Callable[[int], float]
    mixed_s: Callable[[int, float, int, float, float, int], float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an engine is configured with, and the blocks that its memory holds. A sequence that has been begun
    takes `state_blocks` beside those of its context, for the state that linear attention keeps of it."""

    max_running: int
    token_budget: int
    blocks: int
    state_blocks: int = 0


class ServingDurations(Protocol):
    """One replica."""

    @property
    def label(self) -> str:
        """The model and what it runs on, for messages."""
        ...

    @property
    def devices(self) -> int: ...

    @property
    def max_running(self) -> int: ...

    @property
    def token_scale(self) -> int:
        """Tokens of the modelled pair that one of the workload's stands for."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """In the workload's tokens."""
        ...

    def costs(self) -> Costs:
        """Durations of steps, in the modelled pair's tokens."""
        ...

    def bounds(self) -> Bounds: ...

    def token_s(self, running: int) -> float:
        """A decode step of `running` sequences without reading their cache; one of the workload's tokens."""
        ...

    def kv_s(self, running: int) -> float:
        """More for each context token, in the workload's tokens."""
        ...

    def prefill_s(self, context_tokens: int) -> float:
        """Reading one context in, alone."""
        ...

    def prices(self) -> tuple[tuple[float, float], ...]:
        """Pairs of seconds of a generated and of a read token of the workload: no step costs less than what
        is in it, at any of these pairs."""
        ...

    def cache_bytes(self, context_tokens: int) -> float:
        """What a sequence's KV cache takes on each device."""
        ...

    def speed(self) -> Speed:
        """The planner's throughput model of this replica."""
        ...


class TrainingDurations(Protocol):
    """The training unit."""

    @property
    def smallest_unit(self) -> int:
        """Devices that the training state needs at least."""
        ...

    @property
    def token_device_s(self) -> float:
        """Device-seconds that a token takes at least."""
        ...

    def device_s(self, tokens: int, pairs: float) -> float:
        """Device-seconds of a whole RL step's gradients: `tokens`, and `pairs` of them that attend."""
        ...

    def micro_s(self, tokens: int, pairs: float, devices: int) -> float:
        """Seconds that one of many micro-batches adds to a unit of `devices`."""
        ...

    def step_s(self, devices: int) -> float:
        """One optimizer step beyond its gradients."""
        ...


class ClusterDurations(Protocol):
    """All durations of one model group on one cluster."""

    @property
    def serving(self) -> Mapping[Role, ServingDurations]: ...

    @property
    def training(self) -> TrainingDurations: ...

    @property
    def token_scale(self) -> int: ...

    @property
    def extrapolated(self) -> bool:
        """Do kernel times on this device come from another one?"""
        ...

    @property
    def restart_s(self) -> float:
        """From a worker's death to its device being leasable."""
        ...

    @property
    def gpus_per_node(self) -> int: ...

    def phase(self, step: Step, shift: Shift) -> tuple[float, int]:
        """What a phase of a shift takes after its drain: seconds without copying, and the most bytes that a
        device copies."""
        ...

    def copy_s(self, moved: float, sharing: int) -> float:
        """Copying so many bytes while `sharing` devices of the node copy, this one included."""
        ...

    def host_cache_bytes(self, devices: int) -> float:
        """Host memory of a cluster that is free for KV caches on their way."""
        ...

    def publish_s(self, devices: int) -> float: ...

    def update_s(self) -> float:
        """A rollout replica loading a new version."""
        ...

    def warm_shift_s(self) -> float:
        """A typical shift, for the planner's first estimate."""
        ...

"""A cost model fitted to measurements of one machine: a constant and a few slopes for everything.

Used to hold the simulator against live runs. `bench calibrate` measures and fits the coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from systems.costs.durations import BLOCK, Bounds, Costs
from systems.types import SERVING, Role, Shift, Speed, Step

UNBOUNDED = 1 << 40  # tokens: a small engine's cache grows as it has to
AHEAD = 16  # the small engine reads in eight together, and eight more may be on their way to it


@dataclass(frozen=True)
class FittedServing:
    """One replica on one device."""

    label: str
    step_s: float  # a decode step, whatever is in it
    row_s: float  # more for each sequence
    kv_token_s: float  # more for each context token
    read_s: float  # reading newcomers in, whatever they are
    read_token_s: float  # more for each of their context tokens
    max_running: int
    devices: int = 1
    token_scale: int = 1
    kv_capacity_tokens: int = UNBOUNDED

    def costs(self) -> Costs:
        return Costs(self.token_s, self.kv_s, self._mixed_s)

    def bounds(self) -> Bounds:
        return Bounds(self.max_running, UNBOUNDED, UNBOUNDED // BLOCK)

    def token_s(self, running: int) -> float:
        return self.step_s + self.row_s * running

    def kv_s(self, running: int) -> float:
        return self.kv_token_s

    def _mixed_s(
        self, sequences: int, kv_tokens: float, queries: int, pairs: float, context: float, starting: int
    ) -> float:
        """The small engine decodes, and then reads newcomers in."""
        decode = self.token_s(sequences) + self.kv_token_s * kv_tokens if sequences else 0.0
        return decode + self.prefill_s(queries)

    def prefill_s(self, context_tokens: int) -> float:
        return self.read_s + self.read_token_s * context_tokens

    def prices(self) -> tuple[tuple[float, float], ...]:
        """A measured run may beat what a fit predicts, so reading is left out of its floor."""
        return ((min(self.token_s(n) / n for n in range(1, self.max_running + 1)), 0.0),)

    def cache_bytes(self, context_tokens: int) -> float:
        """A live worker keeps no cache for another."""
        return 0.0

    def speed(self) -> Speed:
        return Speed(
            a=self.kv_token_s, b=0.0, c=self.row_s, d=self.step_s, max_running=self.max_running,
            kv_capacity_tokens=self.kv_capacity_tokens, ahead=AHEAD,
        )  # fmt: skip


@dataclass(frozen=True)
class FittedTraining:
    """The training unit: `micro_batches` in a mini-batch are shared out, so more devices do not help."""

    micro_batch_s: float
    token_device_s: float
    optimizer_s: float
    micro_batches: int
    mini_batches: int
    smallest_unit: int = 1

    def device_s(self, tokens: int, pairs: float) -> float:
        return self.mini_batches * self.micro_batches * self.micro_batch_s + self.token_device_s * tokens

    def micro_s(self, tokens: int, pairs: float, devices: int) -> float:
        rounds = -(-self.micro_batches // devices)
        return (self.micro_batch_s + self.token_device_s * tokens) * rounds / self.micro_batches

    def step_s(self, devices: int) -> float:
        return self.optimizer_s


@dataclass(frozen=True)
class FittedCluster:
    """All durations of a live model group. Phases are by the role given up (release) or taken on."""

    serving: Mapping[Role, FittedServing]
    training: FittedTraining
    phase_s: Mapping[Role, Mapping[Step, float]]
    publishing_s: float
    updating_s: float
    restart_s: float
    token_scale: int = 1
    gpus_per_node: int = 1
    extrapolated: bool = False

    def phase(self, step: Step, shift: Shift) -> tuple[float, int]:
        placements = shift.sources if step in (Step.PARK, Step.RELEASE) else shift.targets
        return max((self.phase_s[placement.role].get(step, 0.0) for placement in placements), default=0.0), 0

    def copy_s(self, moved: float, sharing: int) -> float:
        return 0.0  # in the phases

    def host_cache_bytes(self, devices: int) -> float:
        return 0.0

    def publish_s(self, devices: int) -> float:
        return self.publishing_s

    def update_s(self) -> float:
        return self.updating_s

    def warm_shift_s(self) -> float:
        return max(sum(self.phase_s[role].values()) for role in SERVING)

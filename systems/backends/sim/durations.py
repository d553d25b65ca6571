"""What the simulated cluster asks a cost model. Durations are seconds, tokens the workload's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from systems.types import Role, Shift, Speed, Step


class ServingDurations(Protocol):
    """One replica. A decode step of n sequences with KV context tokens in all takes
    `alpha_s(n) + beta_s * KV`."""

    @property
    def label(self) -> str:
        """The model and what it runs on, for messages."""
        ...

    @property
    def devices(self) -> int: ...

    @property
    def max_running(self) -> int: ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def beta_s(self) -> float: ...

    def alpha_s(self, running: int) -> float: ...

    def prefill_s(self, context_tokens: int) -> float:
        """Reading so many tokens of new contexts."""
        ...

    def speed(self) -> Speed:
        """The planner's throughput model of this replica."""
        ...


class TrainingDurations(Protocol):
    """The training unit."""

    @property
    def optimizer_s(self) -> float: ...

    @property
    def smallest_unit(self) -> int:
        """Devices that the training state needs at least."""
        ...

    @property
    def token_device_s(self) -> float:
        """Device-seconds that a token takes at least."""
        ...

    def device_s(self, tokens: int) -> float:
        """Device-seconds of a whole RL step's gradients over `tokens`."""
        ...

    def micro_s(self, tokens: int, devices: int) -> float:
        """Seconds that one of many micro-batches adds to a unit of `devices`."""
        ...


class ClusterDurations(Protocol):
    """All durations of one model group on one cluster. `provisional` ones are not validated."""

    @property
    def serving(self) -> Mapping[Role, ServingDurations]: ...

    @property
    def training(self) -> TrainingDurations: ...

    @property
    def token_scale(self) -> int: ...

    @property
    def provisional(self) -> bool: ...

    @property
    def restart_s(self) -> float:
        """From a worker's death to its device being leasable."""
        ...

    def phase(self, step: Step, shift: Shift) -> tuple[float, int]:
        """Seconds of a shift's phase after its drain, and the most bytes that one device moves in it."""
        ...

    def publish_s(self, devices: int) -> float: ...

    def update_s(self) -> float:
        """A rollout replica loading a new version."""
        ...

    def warm_shift_s(self) -> float:
        """A typical shift, for the planner's first estimate."""
        ...

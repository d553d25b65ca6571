"""What the simulated cluster asks a cost model. Durations are seconds, tokens the workload's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from systems.backends.sim.replica import Bounds, Costs
from systems.types import Role, Shift, Speed, Step


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
    def extrapolated(self) -> bool:
        """Do kernel times on this device come from another one?"""
        ...

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

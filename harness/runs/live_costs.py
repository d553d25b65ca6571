"""What a group's real models cost on one machine: measured by `bench calibrate`, kept as TOML.

The simulator is held against live runs with these coefficients, and the planner of a live run starts from
them. The file that comes with the project says which machine it was measured on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

import workloads
from harness.errors import UsageError
from harness.inputs import read_toml
from systems.costs.calibrated import FittedCluster, FittedServing, FittedTraining
from systems.machine.files import replace_file
from systems.types import SERVING, Role, Step
from workloads.groups import ModelGroup

SHIPPED = Path(workloads.__file__).parent / "hops" / "calibration.toml"
Seconds = Annotated[float, Field(ge=0)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class About(Table):
    """Where and when it was measured."""

    kind: str
    date: str
    processor: str
    platform: str
    torch: str
    workers: int
    cores: int


class ServingFit(Table):
    """Seconds of a decode step and of reading newcomers in; `held_out_error` is of whole rounds."""

    step_s: Seconds
    row_s: Seconds
    kv_token_s: Seconds
    read_s: Seconds
    read_token_s: Seconds
    held_out_error: float


class TrainingFit(Table):
    """Seconds of a micro-batch's gradient, and of the optimizer's step."""

    micro_batch_s: Seconds
    token_s: Seconds
    optimizer_s: Seconds
    held_out_error: float


class ControlFit(Table):
    """Median seconds of other actions. Phases are by the role given up (release) or taken on."""

    publish_s: Seconds
    update_s: Seconds
    restart_s: Seconds
    phase_s: dict[Role, dict[Step, Seconds]]


class GroupFit(Table):
    """One model group."""

    rollout: ServingFit
    reward: ServingFit
    training: TrainingFit
    control: ControlFit


class Calibration(Table):
    """A whole file."""

    about: About
    groups: dict[str, GroupFit]

    def of(self, model: str) -> Calibration:
        """The part for one group. Raises `UsageError` if it was not measured."""
        if model not in self.groups:
            raise UsageError(
                f"the calibration has no {model} (it has {', '.join(self.groups)}); "
                f"measure it: bench calibrate --model {model}"
            )
        return self.model_copy(update={"groups": {model: self.groups[model]}})

    def cluster(self, group: ModelGroup) -> FittedCluster:
        """Durations of `group`."""
        fit, recipe = self.groups[group.name], group.workload
        per_mini = -(-recipe.prompts // recipe.mini_batches) * recipe.samples
        return FittedCluster(
            serving={role: _serving(getattr(fit, role), role, group) for role in SERVING},
            training=FittedTraining(
                micro_batch_s=fit.training.micro_batch_s,
                token_device_s=fit.training.token_s,
                optimizer_s=fit.training.optimizer_s,
                micro_batches=-(-per_mini // recipe.micro_batch_samples),
                mini_batches=recipe.mini_batches,
            ),
            phase_s=fit.control.phase_s,
            publishing_s=fit.control.publish_s,
            updating_s=fit.control.update_s,
            restart_s=fit.control.restart_s,
        )


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it as TOML, rounded to what a measurement is worth."""
    import tomli_w

    raw = _rounded(calibration.model_dump(mode="json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "# Measured by 'bench calibrate'. Seconds.\n" + tomli_w.dumps(raw))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _serving(fit: ServingFit, role: Role, group: ModelGroup) -> FittedServing:
    seconds = fit.model_dump(exclude={"held_out_error"})
    label = f"{group.name}'s {role} model on a CPU core"
    return FittedServing(label=label, max_running=group.live.max_running, **seconds)


def load_calibration(path: Path | None) -> Calibration:
    """The file at `path`, or the one that comes with the project. Raises `UsageError`."""
    return read_toml(path or SHIPPED, Calibration, "--calibration")

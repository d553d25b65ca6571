"""What a run is: a system, a resolved model group, and a few numbers. Checked before any work starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import UsageError, unknown
from harness.results.record import cell_sha256, replicates_sha256
from harness.runs.backends import BACKENDS, LIVE, SIM, BackendKind, usual
from harness.runs.costs import Machine, costs_sha256, modelled
from harness.runs.layout import scaled_split
from harness.runs.live_costs import Calibration, load_calibration
from harness.runs.policies import OwnPolicy, check_lengths_are_known, check_planner, find, policy_class
from systems.costs.families import ArchitectureError, read_config
from systems.costs.forward import engines
from systems.costs.hardware import hardware_names
from systems.costs.machines import MOST_MACHINES
from systems.types import Kind, Policy
from workloads.groups import MOST_DEVICES, ModelGroup, group_names, load_group
from workloads.traces import Trace, TraceError, read_trace

MOST_STEPS = 1_000_000  # of a run, and of the staleness bound
FAILED_REQUESTS = ("drop", "refuse")  # what a trace's failed requests may be
NO_CONFIGS: dict[str, Path] = {}


class RunSpec(BaseModel):
    """A fully resolved request: equal specs make equal runs. It survives its JSON form.

    A field that is None by default is not in that form when it is None: older specs do not have it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str
    backend: str
    steps: int
    seed: int
    staleness: int
    group: ModelGroup
    calibration: Calibration | None = None  # what live workers cost; the planner's prior
    trace: Trace | None = None  # lengths in place of priors
    machine: Machine | None = None  # a plausible one; None: the nominal one
    planner: str | None = None  # None: the system's own, or it asks none
    own: OwnPolicy | None = None  # where the policy is, if it is not one of the project's

    @property
    def on(self) -> BackendKind:
        """What it is made on."""
        return BACKENDS[self.backend]

    @property
    def policy(self) -> type[Policy[Any]]:
        """The class that decides."""
        return policy_class(self.system, self.own)

    @property
    def kind(self) -> Kind:
        """The kind of its numbers."""
        return self.on.kind

    def to_json(self) -> dict[str, Any]:
        """What a manifest keeps, and what its digests are of."""
        return {key: value for key, value in self.model_dump(mode="json").items() if value is not None}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_json`. Older versions kept a trace's name and digest without its rows: a spec of
        theirs has no trace."""
        trace = raw.get("trace")
        kept = {**raw, "trace": trace if trace and "outputs" in trace else None}
        return cls.model_validate(kept)

    def with_seed(self, seed: int) -> RunSpec:
        """The same request with another seed: a replicate."""
        return self.model_copy(update={"seed": seed})

    def on_machine(self, number: int, of: int) -> RunSpec:
        """The same request on a plausible machine; number 0 is the nominal one. Raises `UsageError`."""
        if number and self.on.measured:
            raise UsageError(f"--machines: --backend {self.on.name} is measured, on the one machine there is")
        if not 0 <= number <= of <= MOST_MACHINES:
            raise UsageError(f"--machines {of}: from 1 to {MOST_MACHINES}")
        return self.model_copy(update={"machine": Machine(number=number, of=of) if number else None})

    @property
    def digest(self) -> str:
        """The digest of everything but the seed: runs that share it are replicates."""
        return replicates_sha256(self.to_json())

    @property
    def costs_sha256(self) -> str | None:
        """The digest of the coefficients that its durations come from; None where they are measured."""
        return None if self.on.measured else costs_sha256()

    @property
    def name(self) -> str:
        """What its directory is called, behind the time."""
        machine = f"-m{self.machine.number}" if self.machine else ""
        return f"{self.system}-{self.group.name}-{self.digest[:8]}-s{self.seed}{machine}"

    def manifest(self) -> dict[str, Any]:
        """What a run's record says of its request."""
        return {
            "kind": self.kind,
            "spec": self.to_json(),
            "spec_sha256": self.digest,
            "cell": self.id,
            "costs_sha256": self.costs_sha256,
        }

    @property
    def id(self) -> str:
        """The digest of all that decides a run beside the code: equal ids make equal runs."""
        return cell_sha256(self.to_json(), self.costs_sha256)


def resolve(
    *, system: str, model: str, backend: str | None, steps: int, seed: int, staleness: int | None,
    gpus: int | None, settings: tuple[str, ...], calibration: Path | None = None,
    configs: Mapping[str, Path] = NO_CONFIGS, trace: Path | None = None, trace_failed: str | None = None,
    planner: str | None = None, split: str | None = None,
) -> RunSpec:  # fmt: skip
    """Turn a request into a spec, or raise `UsageError` with the nearest right thing."""
    system, own = find(system)
    policy = policy_class(system, own)
    if planner is not None:
        check_planner(planner, system, policy)
    if model not in (known := group_names()):
        raise unknown("model", model, known)
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps {steps}: a run needs at least 1 step, and {MOST_STEPS} are the most")
    check_seed(seed)
    if staleness is not None and not 0 <= staleness <= MOST_STEPS:
        raise UsageError(f"--staleness {staleness}: the bound cannot be negative, or above {MOST_STEPS}")
    if gpus is not None and gpus > MOST_DEVICES:
        raise UsageError(f"--gpus {gpus}: at most {MOST_DEVICES}")
    group = apply_settings(load_group(model), settings)
    on = BACKENDS[backend] if backend else usual(group)
    if on.real and group.real is None:
        real = ", ".join(name for name in known if load_group(name).real)
        raise UsageError(
            f"--backend {on.name}: {model} has no real weights here; it runs with --backend {SIM.name} "
            f"(groups with real weights: {real})"
        )
    if planner is not None:
        check_lengths_are_known(planner, on.real)
    for setting in settings:
        for unread in on.unread:
            if fnmatch(setting.partition("=")[0], unread):
                raise UsageError(f"--set {setting}: --backend {on.name} does not read {unread}")
    if configs and on.measured:
        raise UsageError(f"--policy-config and --judge-config: --backend {on.name} runs its own tiny models")
    group = with_configs(group, configs)
    if trace is not None and on.real:
        raise UsageError(
            f"--trace {trace}: lengths are real with --backend {on.name}; give --backend {SIM.name}"
        )
    if calibration is not None and not on.measured:
        raise UsageError(f"--calibration {calibration}: only --backend {LIVE.name} reads it")
    if on.hardware is not None:
        group = group.model_copy(
            update={"cluster": group.cluster.model_copy(update={"hardware": on.hardware})}
        )
        gpus = min(group.cluster.gpus, max(3, cores())) if gpus is None else gpus
    elif group.cluster.engine not in (versions := engines()):
        raise unknown("engine", group.cluster.engine, versions)
    elif group.cluster.hardware not in (profiles := hardware_names()):
        raise unknown("hardware", group.cluster.hardware, profiles)
    if gpus is not None:
        group = with_gpus(group, gpus, on, policy.time_shares)
    if split is not None:
        group = with_split(group, split)
    if staleness is None:
        staleness = policy.default_staleness
    measured = load_calibration(calibration).of(model) if on.measured else None
    return RunSpec(
        system=system, group=group, backend=on.name, steps=steps, seed=seed, staleness=staleness,
        calibration=measured, trace=_read_trace(trace, trace_failed or FAILED_REQUESTS[0]), planner=planner,
        own=own,
    )  # fmt: skip


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"--seed {seed}: from 0 to 2^63 - 1")


def _read_trace(path: Path | None, failed: str) -> Trace | None:
    """`failed` requests are left out ("drop"), or the trace is refused for them ("refuse")."""
    if failed not in FAILED_REQUESTS:
        raise unknown("--trace-failed", failed, FAILED_REQUESTS)
    try:
        return read_trace(path, failed == "refuse") if path is not None else None
    except TraceError as error:
        raise UsageError(f"--trace {error}") from None


def with_configs(group: ModelGroup, configs: Mapping[str, Path]) -> ModelGroup:
    """The same group with other models: a `config.json` for `policy`, `judge` or both."""
    for which, path in configs.items():
        try:
            model = read_config(path)
        except ArchitectureError as error:
            raise UsageError(f"--{which}-config {error}") from None
        pair = group.pair.model_copy(update={which: model.name})
        custom = {**group.custom, model.name: asdict(model)}
        group = group.model_copy(update={"pair": pair, "custom": custom})
    return group


def cores() -> int:
    """Cores that this process may use: its affinity, or less where a container's quota says so."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return allowed


def apply_settings(group: ModelGroup, settings: tuple[str, ...]) -> ModelGroup:
    """Apply `table.key=value` overrides."""
    raw = group.model_dump()
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        table, _, key = dotted.partition(".")
        if not equals:
            raise UsageError(f"--set {setting}: expected table.key=value")
        options = {f"{name}.{field}" for name, field in _settable(group)}
        if dotted not in options:
            raise unknown("--set key", dotted, sorted(options))
        raw[table][key] = text
        try:
            raw = ModelGroup.model_validate(raw).model_dump()
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise UsageError(f"--set {dotted}={text}: {reason}") from None
    return ModelGroup.model_validate(raw)


def _settable(group: ModelGroup) -> list[tuple[str, str]]:
    tables = ("pair", "cluster", "memory", "costs", "workload", "lengths", "learning", "live", "faults")
    return [(name, field) for name in tables for field in type(getattr(group, name)).model_fields]


def with_gpus(group: ModelGroup, gpus: int, on: BackendKind, time_shares: bool) -> ModelGroup:
    """The same group on another number of devices; the template split keeps its proportions."""
    split = scaled_split(group, gpus, train_min(group, on), time_shares)
    cluster = group.cluster.model_copy(update={"gpus": gpus, **split})
    return group.model_copy(update={"cluster": cluster})


def with_split(group: ModelGroup, split: str) -> ModelGroup:
    """The same group with another template split: TRAIN/ROLLOUT/REWARD, in devices."""
    if split == "auto":
        raise UsageError("--split auto: only 'bench run' searches; give a split as TRAIN/ROLLOUT/REWARD")
    parts = split.split("/")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise UsageError(f"--split {split}: expected TRAIN/ROLLOUT/REWARD, as in 64/32/32")
    train, rollout, reward = map(int, parts)
    gpus = group.cluster.gpus
    if train + rollout + reward != gpus:
        raise UsageError(
            f"--split {split}: adds up to {train + rollout + reward}, and there are {gpus} devices"
        )
    update = {"train": train, "rollout": rollout, "reward": reward}
    return group.model_copy(update={"cluster": group.cluster.model_copy(update=update)})


def train_min(group: ModelGroup, on: BackendKind) -> int:
    """Devices that the training state needs at least."""
    return 1 if on.measured else modelled(group, real=False).training.smallest_unit

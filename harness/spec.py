"""What a run is: a system, a resolved model group, and a few numbers. Checked before any work starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, unknown
from systems.backends.sim.cost import hardware_names
from systems.policies import ALIASES, SYSTEMS
from systems.types import Kind
from workloads.groups import ModelGroup, group_names, load_group

BACKENDS = {"sim": Kind.SIMULATED, "cosim": Kind.COSIMULATED, "live": Kind.MEASURED}


@dataclass(frozen=True)
class RunSpec:
    """A fully resolved request: equal specs make equal runs."""

    system: str
    group: ModelGroup
    backend: str
    steps: int
    seed: int
    staleness: int

    @property
    def kind(self) -> Kind:
        return BACKENDS[self.backend]

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "backend": self.backend,
            "steps": self.steps,
            "seed": self.seed,
            "staleness": self.staleness,
            "group": self.group.model_dump(mode="json"),
        }

    @property
    def digest(self) -> str:
        """Of everything but the seed: runs that share it are replicates."""
        content = {key: value for key, value in self.to_json().items() if key != "seed"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def resolve(
    *, system: str, model: str, backend: str | None, steps: int, seed: int, staleness: int | None,
    gpus: int | None, settings: tuple[str, ...],
) -> RunSpec:  # fmt: skip
    """Turn a request into a spec, or raise `UsageError` with the nearest right thing."""
    system = ALIASES.get(system, system)
    if system not in SYSTEMS:
        raise unknown("system", system, [*SYSTEMS, *ALIASES])
    if model not in (known := group_names()):
        raise unknown("model", model, known)
    if steps < 1:
        raise UsageError(f"--steps {steps}: a run needs at least 1 step")
    if staleness is not None and staleness < 0:
        raise UsageError(f"--staleness {staleness}: the bound cannot be negative")
    group = apply_settings(load_group(model), settings)
    if gpus is not None:
        group = with_gpus(group, gpus)
    backend = backend or ("cosim" if group.real else "sim")
    if backend != "sim" and group.real is None:
        real = ", ".join(name for name in known if load_group(name).real)
        raise UsageError(
            f"--backend {backend}: {model} has no real weights here; it runs with --backend sim "
            f"(groups with real weights: {real})"
        )
    unread = "learning" if backend == "sim" else "lengths"
    for setting in settings:
        if setting.startswith(f"{unread}."):
            raise UsageError(f"--set {setting}: --backend {backend} does not read {unread}.*")
    if group.cluster.hardware not in (profiles := hardware_names()):
        raise unknown("hardware", group.cluster.hardware, profiles)
    if staleness is None:
        staleness = SYSTEMS[system].default_staleness
    return RunSpec(system, group, backend, steps, seed, staleness)


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
    tables = ("cluster", "workload", "lengths", "learning", "faults")
    return [(name, field) for name in tables for field in type(getattr(group, name)).model_fields]


def with_gpus(group: ModelGroup, gpus: int) -> ModelGroup:
    """The same group on another number of devices; the template split keeps its proportions."""
    from harness.build import scaled_split

    split = scaled_split(group, gpus)
    cluster = group.cluster.model_copy(update={"gpus": gpus, **split})
    return group.model_copy(update={"cluster": cluster})

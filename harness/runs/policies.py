"""Which policy a run is under: one of the project's systems, or a class in a file of the user's.

`--system ./my_policy.py:MyPolicy` names a file outside of the packages. A run keeps its path and digest: what
is run again, or replayed, must be the same text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.errors import UsageError, unknown
from systems.policies import ALIASES, SYSTEMS, takes_planner
from systems.policies.planners import PLANNERS
from systems.types import Policy

NEEDED = ("name", "default_staleness", "time_shares", "begin", "plan")  # what a policy has


class OwnPolicy(BaseModel):
    """A policy outside of the packages: a class in a file, and the digest of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    name: str
    sha256: str

    @property
    def label(self) -> str:
        """What the system is called in results."""
        return f"{Path(self.path).stem}.{self.name}"


def check_lengths_are_known(planner: str, real: bool) -> None:
    """Nobody knows how long real text will be."""
    if PLANNERS[planner].knows_lengths and real:
        raise UsageError(f"--planner {planner}: it is told the true lengths, which only --backend sim knows")


def is_own(system: str) -> bool:
    """Does this name a file of the user's, rather than one of the project's systems?"""
    return ":" in system or system.endswith(".py")


def find(system: str) -> tuple[str, OwnPolicy | None]:
    """The system that a request names, and where its policy is if it is not one of the project's."""
    path, colon, name = system.rpartition(":")
    if not is_own(system):
        system = ALIASES.get(system, system)
        if system not in SYSTEMS:
            raise unknown("system", system, [*SYSTEMS, *ALIASES])
        return system, None
    if not colon:
        raise UsageError(f"--system {system}: which class in it? Expected FILE.py:CLASS")
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--system {system}: {path}: {error.strerror or error}") from None
    own = OwnPolicy(path=str(Path(path).resolve()), name=name, sha256=hashlib.sha256(text).hexdigest())
    _load(own)
    return own.label, own


def policy_class(system: str, own: OwnPolicy | None) -> type[Policy[Any]]:
    """Raises `UsageError` if a policy of the user's is not what it was, or no policy."""
    return _load(own) if own is not None else SYSTEMS[system]


def check_planner(planner: str, system: str, kind: type[Policy[Any]]) -> None:
    """Raises `UsageError` for a planner that there is not, or that nobody would ask."""
    if planner not in PLANNERS:
        raise unknown("planner", planner, PLANNERS)
    if not takes_planner(kind):
        asked = ", ".join(name for name, kind in SYSTEMS.items() if takes_planner(kind))
        raise UsageError(f"--planner {planner}: {system} asks no planner; {asked} does")


def _load(own: OwnPolicy) -> type[Policy[Any]]:
    where = f"--system {own.path}:{own.name}"
    try:
        text = Path(own.path).read_bytes()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from None
    if hashlib.sha256(text).hexdigest() != own.sha256:
        raise UsageError(f"{where}: the file is not what it was when the run was asked for")
    module = _imported(own, where)
    if not hasattr(module, own.name):
        classes = [
            name for name, one in vars(module).items() if isinstance(one, type) and hasattr(one, "plan")
        ]
        raise unknown(f"class in {own.path}", own.name, classes)
    kind = getattr(module, own.name)
    missing = [needed for needed in NEEDED if not hasattr(kind, needed)]
    if not isinstance(kind, type) or missing:
        lacks = f"it has no {missing[0]}" if missing else "it is not a class"
        raise UsageError(f"{where}: not a policy: {lacks}")
    return kind


@cache
def _imported(own: OwnPolicy, where: str) -> ModuleType:
    name = f"own_policy_{own.sha256[:16]}"
    found = importlib.util.spec_from_file_location(name, own.path)
    if found is None or found.loader is None:
        raise UsageError(f"{where}: not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{where}: cannot be imported: {type(error).__name__}: {error}{line}") from None
    return module

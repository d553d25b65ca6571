"""A suite: which runs a study is made of. A TOML file becomes cells; every refusal names its line and key.

    about = "..."
    steps = 20
    seeds = [11, 12, 13]

    [variants.early]                       # settings under a name, as 'bench run --set' takes them
    "lengths.response_median" = 700

    [[grid]]                               # the product of all its lists; a suite may have several
    system = [...]                         # names of 'bench list systems'
    model = "moe-30b"
    variant = ["early"]
    staleness = ["default", 0]             # also: gpus, backend
    [grid.set]                             # settings of this grid; a list is an axis of its own
    "costs.training" = [0.5, 1.0]

A cell is one run, told by the hash of what its request resolves to. Cells that resolve to the same are one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

import workloads
from harness.errors import BenchError, UsageError, unknown
from harness.inputs import parsed
from harness.runs.assemble import check_request
from harness.runs.backends import BACKENDS
from harness.runs.policies import is_own
from harness.runs.spec import RunSpec, check_seed, resolve
from systems.costs.machines import MOST_MACHINES
from systems.policies import ALIASES, SYSTEMS
from systems.policies.planners import PLANNERS
from workloads.groups import group_names

SUITES = Path(workloads.__file__).parent / "suites"
Count = Annotated[int, Field(strict=True)]
Key = tuple[str | int, ...]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(Table):
    """One product of axes."""

    system: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    model: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    variant: Annotated[list[str] | None, BeforeValidator(_listed), Field(min_length=1)] = None
    staleness: Annotated[list[Any], BeforeValidator(_listed), Field(min_length=1)] = ["default"]
    gpus: Annotated[list[Count] | None, BeforeValidator(_listed), Field(min_length=1)] = None
    backend: Annotated[list[str] | None, BeforeValidator(_listed), Field(min_length=1)] = None
    planner: Annotated[list[str] | None, BeforeValidator(_listed), Field(min_length=1)] = None
    machines: Annotated[Count, Field(ge=1, le=MOST_MACHINES)] | None = None  # None: the nominal one alone
    set: dict[str, Any] = {}


class SuiteFile(Table):
    """The file as it is written."""

    about: str = ""
    steps: Annotated[Count, Field(ge=1)] = 20
    seeds: Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
    variants: dict[str, dict[str, Any]] = {}
    grid: Annotated[list[Grid], Field(min_length=1)]


@dataclass(frozen=True)
class Cell:
    """One run: what to ask `bench run` for, what that resolves to, and where it is from."""

    id: str
    spec: RunSpec
    request: tuple[str, ...]  # arguments of 'bench run'
    variant: str | None
    settings: tuple[str, ...]  # of its grid, with gpus and backend where the suite gives them
    grids: tuple[int, ...]  # of the suite that it belongs to

    @property
    def label(self) -> str:
        spec = self.spec
        named = [spec.system, spec.group.name, *([self.variant] if self.variant else []), *self.settings]
        machine = f" machine {spec.machine}" if spec.machine else ""
        return f"{' '.join(named)} staleness {spec.staleness} seed {spec.seed}{machine}"

    @property
    def pair(self) -> str:
        """What cells that differ in the system alone share."""
        kept = {
            key: value for key, value in self.spec.to_json().items() if key not in ("system", "staleness")
        }
        return json.dumps(kept, sort_keys=True)


@dataclass(frozen=True)
class Suite:
    """A checked suite: every cell of it can start."""

    name: str
    path: Path
    about: str
    cells: tuple[Cell, ...]

    @property
    def sha256(self) -> str:
        """The digest of its cells, in any order."""
        return hashlib.sha256("\n".join(sorted(cell.id for cell in self.cells)).encode()).hexdigest()


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(name: str) -> Suite:
    """A suite of `workloads/suites/`, or a file. Raises `UsageError` naming line and key."""
    path = Path(name) if name.endswith(".toml") or "/" in name else SUITES / f"{name}.toml"
    if not path.is_file():
        if path.parent == SUITES:
            files = [f"{name}.toml"] if Path(f"{name}.toml").is_file() else []
            raise unknown("suite", name, [*suite_names(), *files])
        raise UsageError(f"{name}: " + ("not a file" if path.exists() else "no such file"))
    try:
        source = _Source(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        file = SuiteFile.model_validate(_flat(parsed(source.text, str(path))))
    except ValidationError as error:
        source.refuse_first(error)
    if repeated := [seed for seed, times in Counter(file.seeds).items() if times > 1]:
        source.refuse(("seeds",), f"seed {repeated[0]} is there twice")
    for seed in file.seeds:
        try:
            check_seed(seed)
        except UsageError as error:
            source.refuse(("seeds",), str(error))
    cells: dict[str, Cell] = {}
    for number, grid in enumerate(file.grid):
        for cell in _cells(source, file, number, grid):
            known = cells.setdefault(cell.id, cell)
            if number not in known.grids:
                cells[cell.id] = replace(known, grids=(*known.grids, number))
    return Suite(path.stem, path, file.about, tuple(cells.values()))


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings may be written `"lengths.drift" = 1` or `lengths.drift = 1`."""
    variants, grids = raw.get("variants"), raw.get("grid")
    if isinstance(variants, dict):
        raw["variants"] = {name: _dotted(table) for name, table in variants.items()}
    for grid in grids if isinstance(grids, list) else ():
        if isinstance(grid, dict) and "set" in grid:
            grid["set"] = _dotted(grid["set"])
    return raw


def _dotted(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{key}.{name}": one for name, one in inner.items()} if inner is not None else {key: value}
    return flat


# ------------------------------------------------------------------------------------------- cells


def _cells(source: _Source, file: SuiteFile, number: int, grid: Grid) -> Iterator[Cell]:
    at: Key = ("grid", number)
    known = {"system": [*SYSTEMS, *ALIASES], "model": group_names(), "variant": list(file.variants),
             "backend": list(BACKENDS), "planner": list(PLANNERS)}  # fmt: skip
    for axis, names in known.items():
        for name in getattr(grid, axis) or ():
            if name not in names and not (axis == "system" and is_own(name)):
                source.refuse((*at, axis), str(unknown(axis, name, names)))
    for bound in grid.staleness:
        if bound != "default" and (not isinstance(bound, int) or isinstance(bound, bool)):
            source.refuse((*at, "staleness"), f"expected a number of versions or 'default', not {bound!r}")
    for key, values in grid.set.items():
        if _listed(values) == []:
            source.refuse((*at, "set", key), "is empty")
        for variant in grid.variant or ():
            if key in file.variants[variant]:
                source.refuse((*at, "set", key), f"variant '{variant}' sets it, too")
    axes: list[Sequence[Any]] = [
        grid.system, grid.model, grid.variant or [None], grid.staleness, grid.gpus or [None],
        grid.backend or [None], grid.planner or [None],
        *([(key, value) for value in _listed(given)] for key, given in grid.set.items()),
    ]  # fmt: skip
    for system, model, variant, staleness, gpus, backend, planner, *chosen in itertools.product(*axes):
        asked = _Asked(
            system, model, backend, file.steps, None if staleness == "default" else staleness, gpus, planner,
            (*(file.variants[variant].items() if variant else ()), *chosen),
        )  # fmt: skip
        try:
            spec = asked.resolved(file.seeds[0])
        except BenchError as error:
            what = " ".join(part for part in (system, model, variant) if part)
            source.refuse(_blamed(asked, file, at, variant, grid), f"{what}: {error}")
        named = [
            f"{key}={value}"
            for key, value in (("gpus", gpus), ("backend", backend), ("planner", planner), *chosen)
            if value is not None
        ]
        for machine in range(1, grid.machines + 1) if grid.machines else (0,):
            try:
                drawn = spec.on_machine(machine, grid.machines or 0)
            except UsageError as error:
                source.refuse((*at, "machines"), str(error))
            for seed in file.seeds:
                one = drawn.with_seed(seed)
                yield Cell(one.id, one, asked.arguments(one), variant, tuple(named), (number,))


@dataclass(frozen=True)
class _Asked:
    """One combination of a grid, before it has a seed."""

    system: str
    model: str
    backend: str | None
    steps: int
    staleness: int | None
    gpus: int | None
    planner: str | None
    settings: tuple[tuple[str, Any], ...]

    def resolved(self, seed: int) -> RunSpec:
        """Raises `BenchError` for what cannot start."""
        pairs = tuple(f"{key}={value}" for key, value in self.settings)
        spec = resolve(
            system=self.system, model=self.model, backend=self.backend, steps=self.steps, seed=seed,
            staleness=self.staleness, gpus=self.gpus, settings=pairs, planner=self.planner,
        )  # fmt: skip
        check_request(spec)
        return spec

    def arguments(self, spec: RunSpec) -> tuple[str, ...]:
        """The same, on the seed and machine of `spec`, as arguments of 'bench run'."""
        seed = spec.seed
        options = {"system": self.system, "model": self.model, "backend": self.backend, "steps": self.steps,
                   "seed": seed, "staleness": self.staleness, "gpus": self.gpus,
                   "planner": self.planner}  # fmt: skip
        named = [(f"--{key}", str(value)) for key, value in options.items() if value is not None]
        named += [("--set", f"{key}={value}") for key, value in self.settings]
        named += [("--machine", f"{spec.machine.number}/{spec.machine.of}")] if spec.machine else []
        return tuple(itertools.chain.from_iterable(named))


def _blamed(asked: _Asked, file: SuiteFile, at: Key, variant: str | None, grid: Grid) -> Key:
    """The key that a refusal is about: the last one without which there is none."""

    def passes(other: _Asked) -> bool:
        try:
            other.resolved(file.seeds[0])
        except BenchError:
            return False
        return True

    for index in reversed(range(len(asked.settings))):
        if passes(replace(asked, settings=asked.settings[:index] + asked.settings[index + 1 :])):
            key = asked.settings[index][0]
            of_variant = variant is not None and index < len(file.variants[variant])
            return ("variants", variant or "", key) if of_variant else (*at, "set", key)
    axes: dict[str, dict[str, Any]] = {
        "planner": {"planner": None}, "gpus": {"gpus": None}, "staleness": {"staleness": None},
        "backend": {"backend": None},
    }  # fmt: skip
    for axis, without in axes.items():
        if getattr(grid, axis) and passes(replace(asked, **without)):
            return (*at, axis)
    return (*at, "model")


# ------------------------------------------------------------------------------------------- refusals


class _Source:
    """A suite's text, and the line of each of its keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self._lines = _lines_of(self.text)

    def refuse(self, key: Key, why: str) -> NoReturn:
        """Raises `UsageError` with the nearest line that is known for `key`."""
        known = key
        while known and known not in self._lines:
            known = known[:-1]
        line = f":{self._lines[known]}" if known else ""
        raise UsageError(f"{self.path}{line}: {_spelled(key)}: {why}")

    def refuse_first(self, error: ValidationError) -> NoReturn:
        """The first error, but a misspelled key before all: it may explain the others."""
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        key = first["loc"]
        if first["type"] == "list_type" and key == ("grid",):
            self.refuse(key, "a grid is written [[grid]], in two brackets")
        if first["type"] == "extra_forbidden":
            owner = Grid if key[0] == "grid" else SuiteFile
            self.refuse(key, str(unknown("key", str(key[-1]), owner.model_fields)))
        if first["type"] == "missing":
            self.refuse(key, "is missing")
        if first["type"] == "too_short":
            self.refuse(key, "is empty")
        self.refuse(key, f"{first['msg'].lower()}, not {first['input']!r}")


def _spelled(key: Key) -> str:
    """('grid', 1, 'system') as 'grid[1].system'."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def _lines_of(text: str) -> Mapping[Key, int]:
    """Where tables and keys begin. Good enough for a message: it never decides anything."""
    lines: dict[Key, int] = {}
    table: Key = ()
    arrays: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*\[\[\s*([\w-]+)\s*\]\]", line):
            name = found.group(1)
            table = (name, arrays[name])
            arrays[name] += 1
            lines.setdefault((name,), number)
            lines[table] = number
        elif found := re.match(r"\s*\[\s*([\w.\"-]+)\s*\]\s*(?:#|$)", line):
            first, *rest = found.group(1).replace('"', "").split(".")
            table = (first, arrays[first] - 1, *rest) if first in arrays else (first, *rest)
            lines[table] = number
        elif found := re.match(r"\s*([\w.\"-]+)\s*=", line):
            lines[(*table, found.group(1).replace('"', ""))] = number
    return lines

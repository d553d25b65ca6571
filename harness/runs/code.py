"""Which code decides a run: found by following imports, so that no list of modules can be forgotten.

A number is decided by its request, by the simulator's coefficients (which have a digest of their own), and by
the code that assembles, drives and summarises the run, with the shipped weights. That code is what is
reachable from the runner and from a live worker, whether it is imported at the top of a module or in a
function. Packages are read from where this process imported them: that is the code that runs.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import workloads

ROOTS = ("harness.runs.runner", "systems.backends.live.worker")  # a run, and what it starts as a process
OURS = ("harness", "systems", "workloads", "paper_figures")
WEIGHTS = Path(workloads.__file__).parent / "hops" / "models"


@cache
def code_sha256() -> str:
    """The digest of all files that decide a run beside its request and the coefficients."""
    return files_sha256(deciding_files())


def deciding_files() -> list[tuple[str, Path]]:
    """(name in the project, path) of every such file, in the order of names."""
    found = {_name(module, path): path for module, path in reachable(ROOTS).items()}
    for path in WEIGHTS.glob("*/*"):
        if path.is_file():
            found[f"workloads/hops/models/{path.parent.name}/{path.name}"] = path
    return sorted(found.items())


def files_sha256(files: Sequence[tuple[str, Path]]) -> str:
    """The digest of these names and contents, in this order."""
    sha = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        sha.update(f"{name} {len(content)}\n".encode())
        sha.update(content)
    return sha.hexdigest()


def reachable(roots: Sequence[str]) -> dict[str, Path]:
    """Modules of this project that these import, and those import, by name with their files."""
    found: dict[str, Path] = {}
    left = list(roots)
    while left:
        module = left.pop()
        if module in found:
            continue
        path = _file(module)
        if path is not None:
            found[module] = path
            left += [*_parents(module), *_imported(path)]
    return found


def _name(module: str, path: Path) -> str:
    folder = module.replace(".", "/")
    return f"{folder}/{path.name}" if path.name == "__init__.py" else f"{folder}.py"


def _parents(module: str) -> Iterator[str]:
    """Importing a module runs the packages that it lies in."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _imported(path: Path) -> Iterator[str]:
    """What a file's import statements may name: modules, or names in modules."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in OURS)


@cache
def _file(module: str) -> Path | None:
    """Its source; None if it is no module but a name in one."""
    parent = module.rpartition(".")[0]
    if parent and (_file(parent) is None or _file(parent).name != "__init__.py"):  # type: ignore[union-attr]
        return None
    found = find_spec(module)
    return Path(found.origin) if found is not None and found.origin else None

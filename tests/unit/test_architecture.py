"""The shape of the house: who may import whom, and who may know a system's name."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from systems.policies import ALIASES, SYSTEMS
from systems.types import Group, Lease, Sample, Sequence

ROOT = Path(__file__).parents[2]
CODE = [
    path
    for room in ("systems", "harness", "workloads", "paper_figures")
    for path in sorted((ROOT / room).rglob("*.py"))
]


def test_imports_point_one_way() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


MOST_MODULES = 14  # of a folder: what a reader can hold in mind; `cli` has one a verb


def test_no_room_is_crowded() -> None:
    rooms = Counter(path.parent for path in CODE if path.name != "__init__.py")
    crowded = {str(room.relative_to(ROOT)): n for room, n in rooms.items() if n > MOST_MODULES}
    assert set(crowded) <= {"harness/cli"}


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_sentences(path: Path) -> None:
    """None begins with "Of": say what a thing is before what it is of."""
    found = [line for line in path.read_text().splitlines() if line.lstrip().startswith('"""Of ')]
    assert not found


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_compares_with_a_systems_name(path: Path) -> None:
    if path.parent.name == "policies":
        return
    names = "|".join(map(re.escape, [*SYSTEMS, *ALIASES]))
    compared = re.compile(rf"""(==|!=|\bin\b|\bis\b|match|case)[^#\n]*["']({names})["']""")
    found = [line for line in path.read_text().splitlines() if compared.search(line)]
    assert not found, f"{path} asks which system it is: {found}"


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_control_code_has_no_clock_and_no_global_randomness(path: Path) -> None:
    if "systems" not in path.parts or "live" in path.parts:
        return
    forbidden = re.compile(r"\b(time\.(time|monotonic|perf_counter|sleep)|random\.(random|choice|shuffle)\()")
    assert not forbidden.search(path.read_text())


MUTABLE = (Group, Sample, Sequence, Lease)
CHANGING = {"append", "appendleft", "extend", "insert", "pop", "remove", "clear", "update", "setdefault"}


def _changed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute that is assigned to, or whose content is; not those of one's own."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING
        ):
            targets = [node.func.value]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                while isinstance(one, ast.Subscript):
                    one = one.value
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) not in ("self", "self._demand"):
                    yield node.lineno, one.attr


def test_only_lifecycle_changes_the_mutable_types() -> None:
    """In the control plane, that is: fields of workers have names like these."""
    names = {field.name for cls in MUTABLE for field in dataclasses.fields(cls)}
    found = {}
    for path in sorted((ROOT / "systems").glob("*.py")):
        lines = {line for line, name in _changed(ast.parse(path.read_text())) if name in names}
        if lines:
            found[path.name] = sorted(lines)
    assert set(found) == {"lifecycle.py"}, found


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, harness.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'vllm', 'pandas', 'matplotlib', 'pydantic', 'pyarrow', 'numpy', 'rich'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "LOADED []" in result.stdout, result.stdout + result.stderr


def test_simulation_loads_no_torch() -> None:
    code = "import sys, harness.runs.runner, harness.runs.assemble; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "False", result.stderr


def test_a_new_system_needs_no_edit_outside_policies() -> None:
    for name in SYSTEMS:
        hits = [
            path
            for path in CODE
            if path.parent.name != "policies" and re.search(rf"""["']{name}["']""", path.read_text())
        ]
        assert not hits, f"{name} is named in {hits}"

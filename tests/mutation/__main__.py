"""Draws mutants by a committed seed, runs tests on each in a clone, and writes the score.

    python -m tests.mutation [--out FILE] [--jobs N] [--drawn N] [--only MODULE]

A mutant is one small change of one place, made by cosmic-ray. It is killed if a test fails, and survives if
all pass; one whose tests do not end in time is counted apart. What was done stays in --out, line by line, so
that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutation.targets import DRAWN, EXCLUDED, LIMIT_S, SEED, TARGETS

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit code; others than 0 and this mean that a test failed, or nothing can be imported
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
SAME = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")  # comparisons that say the same
CACHES = ("cache", "cached_property", "lru_cache")


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place of `module` at which `operator` can change something."""

    module: str
    operator: str
    occurrence: int
    line: int
    column: int

    @property
    def id(self) -> str:
        return f"{self.module}:{self.line}:{self.column} {self.operator} {self.occurrence}"


# ------------------------------------------------------------------------------- where not


Span = tuple[tuple[int, int], tuple[int, int], str]


def excluded_spans(source: str) -> list[Span]:
    """(start, end, why) of code in which no mutant is made."""
    return [span for node in ast.walk(ast.parse(source)) for span in _of(node)]


def _of(node: ast.AST) -> Iterator[Span]:
    if isinstance(node, ast.AnnAssign):
        yield _span(node.annotation, "annotation")
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [one for one in (node.args.vararg, node.args.kwarg) if one]
        yield from (_span(one.annotation, "annotation") for one in arguments if one.annotation)
        if node.returns:
            yield _span(node.returns, "annotation")
        yield from (_span(d, "cache") for d in node.decorator_list if _name(d) in CACHES)
    elif isinstance(node, ast.ClassDef):
        yield from (_span(d, "dataclass option") for d in node.decorator_list if _name(d) == "dataclass")
        if any(_name(base) == "Protocol" for base in node.bases):
            yield _span(node, "protocol")
    elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
        yield _span(node, "type checking")


def _name(node: ast.expr) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _span(node: ast.expr | ast.stmt, why: str) -> Span:
    first = (node.lineno, node.col_offset - 1)  # a decorator's node begins behind its `@`
    return first, (node.end_lineno or node.lineno, node.end_col_offset or 0), why


# ------------------------------------------------------------------------------- all, and some


def all_mutants(module: str) -> tuple[list[Mutant], Counter[str]]:
    """Every mutant of a module that may be drawn, and how many were left out for which reason."""
    path = ROOT / module
    spans, nodes = excluded_spans(path.read_text()), list(ast_nodes(get_ast_from_path(path)))
    found, left_out = [], Counter[str]()
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        operator, same = kind(), name.removeprefix("core/ReplaceComparisonOperator_") in SAME
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            why = next((why for a, b, why in spans if a <= start and end <= b), None)
            why = "identity" if same else why
            if why is None:
                found.append(Mutant(module, name.removeprefix("core/"), occurrence, *start))
            else:
                left_out[why] += 1
    return found, left_out


def draw(count: int, only: str | None) -> tuple[list[Mutant], int, Counter[str]]:
    """Mutants drawn by the committed seed, how many there were, and what was left out."""
    mutants, left_out = [], Counter[str]()
    for module in TARGETS:
        if only is None or only in module:
            of_module, excluded = all_mutants(module)
            mutants += of_module
            left_out += excluded
    drawn = random.Random(SEED).sample(mutants, min(count, len(mutants)))
    return drawn, len(mutants), left_out


# ------------------------------------------------------------------------------- trying one


class Clones:
    """Work trees, one for each mutant that is tried at a time."""

    def __init__(self, count: int, folder: Path) -> None:
        self.free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            clone = folder / f"clone-{number}"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            self.free.put(clone)

    def check(self, tests: tuple[str, ...]) -> None:
        """Without a mutant all tests pass: else everything would look killed."""
        clone = self.free.get()
        try:
            if (outcome := _tested(clone, tests)) != SURVIVED:
                raise RuntimeError(f"without any mutant, {' '.join(tests)}: {outcome}")
        finally:
            self.free.put(clone)

    def outcome(self, mutant: Mutant) -> str:
        clone = self.free.get()
        try:
            path = clone / mutant.module
            source = path.read_text()
            operator = get_operator(f"core/{mutant.operator}")()
            changed = mutate_code(source, operator, mutant.occurrence)
            if changed is None or changed == source:
                raise RuntimeError(f"{mutant.id} changes nothing")
            path.write_text(changed)
            try:
                return _tested(clone, TARGETS[mutant.module])
            finally:
                path.write_text(source)
        finally:
            self.free.put(clone)


def _tested(clone: Path, tests: tuple[str, ...]) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        command, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.communicate()
        return TIMED_OUT
    if child.returncode == 0:
        return SURVIVED
    if child.returncode == NO_TESTS:
        raise RuntimeError(f"pytest ended with {child.returncode}: {said[-2000:]}")
    return TIMED_OUT if "Timeout (>" in said else KILLED


# ------------------------------------------------------------------------------- all of it


def main() -> None:
    given = argparse.ArgumentParser(prog="python -m tests.mutation")
    given.add_argument("--out", type=Path, default=ROOT / "results" / "mutants.jsonl")
    given.add_argument("--jobs", type=int, default=2)
    given.add_argument("--drawn", type=int, default=DRAWN)
    given.add_argument("--only", help="Modules whose path has this in it.")
    asked = given.parse_args()
    commit = _commit()
    mutants, of, left_out = draw(asked.drawn, asked.only)
    done = _done(asked.out, commit)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    writing = threading.Lock()

    def attempt(mutant: Mutant) -> None:
        outcome = clones.outcome(mutant)
        with writing, asked.out.open("a") as file:
            file.write(json.dumps({"id": mutant.id, "outcome": outcome, "commit": commit}) + "\n")
            done[mutant.id] = outcome
            counts = Counter(done.values())
            print(
                f"{len(done)}/{len(mutants)} {outcome:<9} {mutant.id}  {dict(counts)}",
                file=sys.stderr,
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        clones = Clones(asked.jobs, Path(folder))
        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(clones.check, {TARGETS[mutant.module] for mutant in mutants}))
            list(pool.map(attempt, [mutant for mutant in mutants if mutant.id not in done]))
    print(json.dumps(report(commit, mutants, of, left_out, done), indent=1))


def _commit() -> str:
    """The commit that is tried: clones have what is committed, so modules that differ from it are refused."""
    differ = _git("status", "--porcelain", "--", *TARGETS)
    if differ:
        sys.exit(f"commit first, mutants are of what is committed:\n{differ}")
    return _git("rev-parse", "HEAD")[:7]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _done(out: Path, commit: str) -> dict[str, str]:
    """What was tried at this commit before."""
    lines = out.read_text().splitlines() if out.is_file() else []
    return {row["id"]: row["outcome"] for row in map(json.loads, lines) if row.get("commit") == commit}


def report(
    commit: str, mutants: list[Mutant], of: int, left_out: Counter[str], done: dict[str, str]
) -> dict[str, object]:
    """The score, with every survivor. The clones were made at `commit`, whatever came after it."""
    counts = Counter(done[mutant.id] for mutant in mutants)
    decided = counts[KILLED] + counts[SURVIVED]
    by_module = Counter((mutant.module, done[mutant.id]) for mutant in mutants)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "seed": SEED,
        "mutants": of,
        "drawn": len(mutants),
        **{name.replace(" ", "_"): counts[name] for name in (KILLED, SURVIVED, TIMED_OUT)},
        "killed_share": round(counts[KILLED] / decided, 4) if decided else None,
        "excluded": {why: {"count": count, "reason": EXCLUDED[why]} for why, count in left_out.items()},
        "modules": {
            module: {outcome: by_module[module, outcome] for outcome in (KILLED, SURVIVED, TIMED_OUT)}
            for module in dict.fromkeys(mutant.module for mutant in mutants)
        },
        "survivors": [asdict(mutant) for mutant in mutants if done[mutant.id] == SURVIVED],
        "timed_out_mutants": [asdict(mutant) for mutant in mutants if done[mutant.id] == TIMED_OUT],
    }


if __name__ == "__main__":
    main()

"""Policies from outside of the packages: the page that teaches it, and what a wrong one is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import InvalidRun, UsageError
from harness.results.record import RunDirectory, list_runs
from harness.runs.replay import replay
from harness.runs.runner import run
from harness.runs.spec import RunSpec
from tests.conftest import SMALL, small_spec

PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


def policy_of_the_page() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    return found[1]


def test_the_page_is_short_and_its_commands_work(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert len(policy_of_the_page().splitlines()) <= 60
    (tmp_path / "my_policy.py").write_text(policy_of_the_page())
    commands = re.findall(r"^bench (.*)$", text, re.M)
    assert len(commands) == 3
    small = [part for setting in SMALL for part in ("--set", setting)]
    for command in commands:
        arguments = command.split()
        if arguments[0] == "run":
            arguments += [*small, "--wandb", "disabled", "--quiet"]
        bench = [sys.executable, "-m", "harness.cli", *arguments]
        said = subprocess.run(bench, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr
    assert "my_policy.TwoPools" in said.stdout


def test_a_run_of_it_is_its_own_replay_and_refused_once_the_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(policy_of_the_page())
    done = run(small_spec(f"{file}:TwoPools", gpus=None), tmp_path / "runs").directory
    found = replay(done)
    assert found.decisions > 2
    assert found.differing == ()
    assert found.makespan_error == 0.0
    file.write_text(policy_of_the_page() + "# another text\n")
    with pytest.raises(UsageError, match="not what it was when the run was asked for"):
        _ = RunSpec.from_json(done.manifest["spec"]).policy


def test_a_suite_may_name_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(policy_of_the_page())
    suite = tmp_path / "mine.toml"
    settings = "\n".join(f'"{key}" = {value}' for key, _, value in (s.partition("=") for s in SMALL))
    suite.write_text(
        f'steps = 2\nseeds = [0]\n[[grid]]\nsystem = ["disaggregated", "{tmp_path}/mine.py:TwoPools"]\n'
        f'model = "dense-9b"\n[grid.set]\n{settings}\n'
        '[[grid]]\nsystem = "pivot"\nmodel = "dense-9b"\nplanner = ["flow", "rules"]\n'
        f"[grid.set]\n{settings}\n"
    )
    results = tmp_path / "runs"
    command = [sys.executable, "-m", "harness.cli", "sweep", str(suite), "--results", str(results)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert sorted((m["spec"]["system"], m["spec"].get("planner")) for m in list_runs(results)) == [
        ("disaggregated", None), ("mine.TwoPools", None), ("pivot", "flow"), ("pivot", "rules"),
    ]  # fmt: skip


BEGINNING = """
from dataclasses import dataclass, replace
from systems.policies.disaggregated import Disaggregated
from systems.types import Placement, Plan, Role

class Wrong(Disaggregated):
    def plan(self, view, memory):
        plan, memory = super().plan(view, memory)
"""
WRONG: dict[str, tuple[str, str]] = {
    "raises": ("return plan, memory.nothing", r"raised AttributeError: .*\(mine.py, line 9\)"),
    "no plan": ("return None", "returned NoneType, not a plan and its memory"),
    "memory": ("return plan, {}", "remembers dict; a memory is a frozen dataclass"),
    "past": ("return replace(plan, revisit_ns=view.now_ns), memory", "asks to be woken at"),
    "unknown device": (
        "return Plan((Placement(Role.ROLLOUT, (999,)),)), memory",
        "places rollout on device 999; there are 0 to 15",
    ),
    "two owners": (
        "return Plan((Placement(Role.ROLLOUT, (0,)), Placement(Role.REWARD, (0,)))), memory",
        "gives device 0 to two placements",
    ),
    "width": ("return Plan((Placement(Role.ROLLOUT, (0, 1)),)), memory", "has 2 devices, and its width is 1"),
    "two units": (
        "return Plan((Placement(Role.TRAIN, (0, 1)), Placement(Role.TRAIN, (2, 3)))), memory",
        "has 2 training units",
    ),
    "never settles": (
        "return Plan((), why='thinking', revisit_ns=view.now_ns + 10**9), memory", "nothing has got done for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_a_policy_does_wrong_is_said_in_one_line_and_the_run_is_sealed(
    what: str, tmp_path: Path
) -> None:
    line, said = WRONG[what]
    (tmp_path / "mine.py").write_text(BEGINNING + f"        {line}\n")
    spec = small_spec(f"{tmp_path}/mine.py:Wrong", gpus=None, steps=2)
    with pytest.raises(InvalidRun, match=said) as ended:
        run(spec, tmp_path / "runs")
    assert "\n" not in str(ended.value)
    (manifest,) = list_runs(tmp_path / "runs")
    assert manifest["status"] == "invalid"
    assert re.search(said, manifest["reason"])
    RunDirectory(tmp_path / "runs" / manifest["run"], manifest).check()


Refused = tuple[Callable[[Path], str], str]
REFUSED: dict[str, Refused] = {
    "no class": (lambda file: f"{file}", "Expected FILE.py:CLASS"),
    "no file": (lambda file: f"{file.parent}/none.py:Wrong", "No such file"),
    "another class": (lambda file: f"{file}:Wrongs", "did you mean 'Wrong'"),
    "no policy": (lambda file: f"{file}:Plan", "not a policy: it has no"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_policy_is_refused_before_anything_starts(what: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BEGINNING + "        return plan, memory\n")
    name, said = REFUSED[what]
    with pytest.raises(UsageError, match=said):
        small_spec(name(tmp_path / "mine.py"))


def test_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Wrong:\n    def plan(\n")
    with pytest.raises(UsageError, match=r"cannot be imported: SyntaxError: .*line 2"):
        small_spec(f"{tmp_path}/mine.py:Wrong")


def test_a_planner_is_refused_where_nobody_asks_one() -> None:
    from harness.runs.spec import resolve

    about = {"model": "dense-9b", "backend": None, "steps": 1, "seed": 0, "staleness": None, "gpus": None}
    with pytest.raises(UsageError, match="colocated asks no planner; pivot does"):
        resolve(system="colocated", planner="flow", settings=(), **about)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'itl-harmonic'"):
        resolve(system="pivot", planner="harmonic", settings=(), **about)  # type: ignore[arg-type]

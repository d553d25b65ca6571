"""Suites: what becomes a cell, and refusals that name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.studies.suite import load_suite, suite_names

GOOD = """\
about = "two systems"
steps = 2
seeds = [1, 2, 3]

[variants.long]
"lengths.response_median" = 3000

[variants.short]
lengths.response_median = 500

[[grid]]
system = ["colocated", "pivot"]
model = "dense-9b"
variant = ["long", "short"]

[[grid]]
system = "pivot"
model = "dense-9b"
staleness = [0, 2]

[grid.set]
"workload.prompts" = [64, 128]
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return str(path)


def test_a_suite_is_the_union_of_its_products(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, GOOD))
    assert len(suite.cells) == 3 * (2 * 2 + 2 * 2)
    first = suite.cells[0]
    assert (first.spec.system, first.variant, first.spec.seed) == ("colocated", "long", 1)
    assert first.spec.group.lengths.response_median == 3000
    assert {cell.spec.group.lengths.response_median for cell in suite.cells} == {3000, 500, 1500}
    assert {cell.spec.group.workload.prompts for cell in suite.cells if cell.grids == (1,)} == {64, 128}


def test_cells_that_resolve_to_the_same_are_one(tmp_path: Path) -> None:
    """Colocated is at a bound of 0 by default; an alias is the system that it stands for."""
    text = GOOD.replace('"workload.prompts" = [64, 128]', "").replace("staleness = [0, 2]", "")
    once = load_suite(write(tmp_path, text))
    more = text.replace('system = ["colocated", "pivot"]', 'system = ["colocated", "pivot", "shiftable"]')
    more = more.replace('variant = ["long", "short"]', 'variant = ["long", "short"]\nstaleness = ["default"]')
    twice = load_suite(write(tmp_path, more))
    assert {cell.id for cell in once.cells} == {cell.id for cell in twice.cells}
    assert once.sha256 == twice.sha256


def test_a_cell_is_told_by_what_it_resolves_to_and_not_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here, there = load_suite(write(tmp_path, GOOD)), load_suite(write(tmp_path / "other", "\n" + GOOD))
    assert [cell.id for cell in here.cells] == [cell.id for cell in there.cells]
    assert len({cell.id for cell in here.cells}) == len(here.cells)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("steps = 2", "stpes = 2", 2, "stpes: unknown key 'stpes'; did you mean 'steps'?"),
        ("steps = 2", "steps = 0", 2, "steps: input should be greater than or equal to 1, not 0"),
        ("seeds = [1, 2, 3]", "seeds = []", 3, "seeds: is empty"),
        ("seeds = [1, 2, 3]", 'seeds = ["a"]', 3, "seeds"),
        ("seeds = [1, 2, 3]", "seeds = [1, 2, 1]", 3, "seeds: seed 1 is there twice"),
        ("seeds = [1, 2, 3]", "", None, "seeds: is missing"),
        ("seeds = [1, 2, 3]", "seeds = [1, 2", 5, "unclosed array"),
        ('system = ["colocated", "pivot"]', "system = []", 12, "grid[0].system: is empty"),
        (
            'system = ["colocated", "pivot"]',
            'system = ["colocated",\n  "pivto"]',
            12,
            "grid[0].system: unknown system 'pivto'; did you mean 'pivot'?",
        ),
        ('model = "dense-9b"\nvariant', 'model = "dense-9"\nvariant', 13, "did you mean 'dense-9b'?"),
        ('variant = ["long", "short"]', 'variant = ["lang"]', 14, "did you mean 'long'?"),
        ('variant = ["long", "short"]', 'varient = ["long"]', 14, "did you mean 'variant'?"),
        ("staleness = [0, 2]", "gpus = []", 19, "grid[1].gpus: is empty"),
        ("seeds = [1, 2, 3]", "seeds = [true]", 3, "not True"),
        ("seeds = [1, 2, 3]", "seeds = [-1]", 3, "seeds: --seed -1: from 0 to 2^63 - 1"),
        ("steps = 2", 'steps = "2"', 2, "not '2'"),
        ("staleness = [0, 2]", 'staleness = ["defualt"]', 19, "expected a number of versions or 'default'"),
        (
            "lengths.response_median = 500",
            "lengths.judge_at_1k = -5",
            9,
            "variants.short.lengths.judge_at_1k",
        ),
        ("lengths.response_median = 500", "lengths.response_median = inf", 9, "less than or equal to"),
        ('"workload.prompts" = [64, 128]', '"cluster.hardware" = "h2o"', 22, "did you mean 'h20'?"),
        ("staleness = [0, 2]", "staleness = [-1]", 19, "grid[1].staleness: pivot dense-9b: --staleness -1"),
        ('"workload.prompts" = [64, 128]', '"workload.promts" = 64', 22, "did you mean 'workload.prompts'?"),
        ('"workload.prompts" = [64, 128]', '"workload.prompts" = [64, 63]', 22, "does not divide 63 prompts"),
        ('"workload.prompts" = [64, 128]', '"workload.prompts" = []', 22, "is empty"),
        ('"workload.prompts" = [64, 128]', '"pair.policy_tp" = 3', 22, "grid[1].set.pair.policy_tp"),
        ("lengths.response_median = 500", "lengths.response_median = -5", 9, "greater than 0"),
        ("lengths.response_median = 500", "lengths.response_medain = 5", 9, "did you mean"),
        ("staleness = [0, 2]", "gpus = [16, 0]", 19, "grid[1].gpus"),
        ("staleness = [0, 2]", 'backend = "live"', 19, "no real weights"),
    ],
)
def test_refusals_name_the_line_and_the_key(
    old: str, new: str, line: int | None, says: str, tmp_path: Path
) -> None:
    assert GOOD.count(old) == 1
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as error:
        load_suite(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: "), message
    assert says in message
    assert "\n" not in message


def test_a_cell_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """The longest judgement is blamed, without which the cell would fit."""
    text = """\
seeds = 1
[[grid]]
system = "pivot"
model = ["moe-122b"]
[grid.set]
"lengths.judge_cap" = 9000000
"""
    path = write(tmp_path, text)
    with pytest.raises(
        UsageError,
        match=r"study.toml:6: grid\[0\].set.lengths.judge_cap: pivot moe-122b: .*context tokens fit",
    ):
        load_suite(path)


def test_an_empty_suite_and_an_unknown_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'headline'"):
        load_suite("headlin")
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such file"):
        load_suite("nowhere.toml")
    assert "headline" in suite_names()


def test_a_grid_in_one_bracket_and_a_setting_that_is_there_twice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"study.toml:2: grid: a grid is written \[\[grid\]\]"):
        load_suite(write(tmp_path, 'seeds = 1\n[grid]\nsystem = "pivot"\nmodel = "dense-9b"\n'))
    both = GOOD.replace(
        'variant = ["long", "short"]', 'variant = "long"\nset = {"lengths.response_median" = 5}'
    )
    with pytest.raises(UsageError, match="variant 'long' sets it, too"):
        load_suite(write(tmp_path, both))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(UsageError, match=r"latin\.toml: .*utf-8"):
        load_suite(str(tmp_path / "latin.toml"))


def test_no_grid_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="grid: is missing"):
        load_suite(write(tmp_path, "seeds = [1]\n"))

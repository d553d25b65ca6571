"""Plausible machines: pairs on the same machine, verdicts over all of them, and cells of suites on each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.errors import UsageError
from harness.results.tables import Recorded, Replicate, open_runs
from harness.runs.costs import Machine, modelled
from harness.runs.runner import run
from harness.runs.spec import RunSpec
from harness.studies.claims import Claim, Found, Ratio, _over_machines
from harness.studies.compare import compare, paired_effect
from harness.studies.stats import Verdict
from harness.studies.suite import load_suite
from tests.conftest import SMALL, small_spec
from workloads.groups import load_group

SEEDS, MACHINES = range(8), range(1, 6)


def points(ratios: Mapping[int, float]) -> dict[Replicate, float]:
    """Each machine's ratio, a little different from seed to seed."""
    return {
        Replicate(seed, number, len(ratios)): ratio * (1 + 0.001 * seed)
        for number, ratio in ratios.items()
        for seed in SEEDS
    }


def test_an_effect_over_machines_that_agree() -> None:
    effect, machines = paired_effect(points({1: 1.1, 2: 1.2, 3: 1.3, 4: 1.4, 5: 1.5}))
    assert effect.verdict is Verdict.FASTER
    assert (effect.n, effect.paired) == (8, True)
    assert machines is not None
    assert (machines.machines, machines.share) == (5, 1.0)
    assert 1.1 < machines.low < effect.ratio < machines.high < 1.51


def test_machines_that_do_not_agree_give_no_verdict() -> None:
    effect, machines = paired_effect(points({1: 1.4, 2: 1.3, 3: 1.4, 4: 0.9, 5: 0.9}))
    assert effect.low > 1, "over seeds there is no doubt"
    assert machines is not None
    assert machines.share == pytest.approx(0.6)
    assert effect.verdict is Verdict.INCONCLUSIVE


def test_the_nominal_machine_is_no_spread() -> None:
    assert paired_effect({Replicate(seed, 0, 0): 1.2 for seed in SEEDS})[1] is None


CLAIM = Claim(
    id="x", text="x", source="x", low=1.2, high=1.5, suite="headline", ratio=Ratio(of="pivot", to="colocated")
)  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ((1.3, 1.3, 1.3, 1.3, 1.0001), Found.REPRODUCED),
        ((1.3, 1.3, 1.3, 1.1, 1.1), Found.PARTLY),
        ((1.3, 1.3, 1.3, 0.9, 0.9), Found.NOT_REPRODUCED),
    ],
)
def test_a_claim_holds_on_a_share_of_machines(ratios: tuple[float, ...], found: Found) -> None:
    verdict, why = _over_machines(CLAIM, points(dict(enumerate(ratios, 1))), 0.8)
    assert verdict is found
    assert "of 5 plausible machines" in why
    assert "80% must agree" in why


# ------------------------------------------------------------------------------- requests


def test_a_machine_is_part_of_a_request() -> None:
    nominal = small_spec()
    drawn = nominal.on_machine(2, 5)
    assert "machine" not in nominal.to_json(), "older specs do not have it"
    assert RunSpec.from_json(json.loads(json.dumps(drawn.to_json()))) == drawn
    assert len({one.id for one in (nominal, drawn, nominal.on_machine(2, 6), nominal.on_machine(3, 5))}) == 4
    assert drawn.on_machine(0, 0) == nominal
    assert drawn.name.endswith("-m2")
    with pytest.raises(UsageError, match="--machines 300: from 1 to 256"):
        nominal.on_machine(1, 300)


def test_a_machine_changes_durations_and_nothing_else() -> None:
    group = load_group("moe-122b")
    nominal, drawn = modelled(group, False), modelled(group, False, Machine(number=1, of=4))
    for role in nominal.serving:
        assert nominal.serving[role].token_s(64) != drawn.serving[role].token_s(64)
        assert nominal.serving[role].prefill_s(4000) != drawn.serving[role].prefill_s(4000)
    assert nominal.training.device_s(1000, 5e5) != drawn.training.device_s(1000, 5e5)
    assert nominal.warm_shift_s() != drawn.warm_shift_s()
    assert nominal.training.smallest_unit == drawn.training.smallest_unit


SUITE = """\
seeds = [0, 1]
[[grid]]
system = ["colocated", "pivot"]
model = "dense-9b"
machines = 3
"""


def suite(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return load_suite(str(path))


def test_a_suite_has_a_cell_a_machine(tmp_path: Path) -> None:
    cells = suite(tmp_path, SUITE).cells
    assert len(cells) == 2 * 3 * 2
    assert {cell.spec.machine.number for cell in cells} == {1, 2, 3}
    assert len({cell.pair for cell in cells}) == 3 * 2, "systems share machines and seeds"
    for cell in cells:
        assert f"--machine {cell.spec.machine.number}/3" in " ".join(cell.request)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("machines = 3", "machines = 0", "greater than or equal to 1"),
        ("machines = 3", "machnies = 3", "did you mean 'machines'?"),
    ],
)
def test_a_suite_refuses_machines_that_are_none(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        suite(tmp_path, SUITE.replace(old, new))


# ------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for system in ("colocated", "pivot"):
        spec = small_spec(system, steps=1, staleness=0)
        for number in range(3):
            run(spec.on_machine(number, 2), root)
    return root


def test_runs_of_one_machine_are_pairs(recorded: Path) -> None:
    (found,) = compare(open_runs(recorded), ["colocated", "pivot"])
    assert {replicate.machine for replicate in found.points} == {1, 2}
    assert any("only pairs on one of 2 machines" in note for note in found.notes)
    assert found.machines is not None
    assert not any("nominal machine alone" in note for note in found.notes)
    assert found.to_json()["machines"]["machines"] == 2


def test_the_nominal_machine_is_said(recorded: Path) -> None:
    (found,) = compare(open_runs(recorded), ["colocated,machine=0", "pivot,machine=0"])
    assert found.machines is None
    assert any("on the nominal machine alone" in note for note in found.notes)
    with pytest.raises(UsageError, match="have no machine in common"):
        compare(open_runs(recorded), ["colocated,machine=0", "pivot,machine=1"])


def test_a_run_says_its_machine(recorded: Path) -> None:
    runs: list[Recorded] = open_runs(recorded)
    assert sorted(one.summary["machine"] for one in runs) == ["1 of 2"] * 2 + ["2 of 2"] * 2 + ["nominal"] * 2


def test_machines_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", "--system", "colocated", "--model", "dense-9b", "--steps", "1", "--gpus", "8", "--quiet",
             "--wandb", "disabled", "--results", str(tmp_path)]  # fmt: skip
    asked += [part for setting in SMALL for part in ("--set", setting)]
    main([*asked, "--machines", "2"])
    said = capsys.readouterr().out
    assert "nominal; --machines N draws others" in said
    assert "transferred      gemm 0.87-1.40" in said
    assert "on 2 machines" in said
    assert len(open_runs(tmp_path)) == 3
    main([*asked, "--machine", "2/2", "--json"])
    assert json.loads(capsys.readouterr().out)["machine"] == "2 of 2"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--machine", "3"], "--machine 3: expected K/N, as in 3/16"),
        (["--machine", "3/2"], "--machines 2: from 1 to 256"),
        (["--machines", "0"], "--machines 0: at least 1"),
        (["--machine", "1/2", "--machines", "2"], "give one of the two"),
    ],
)
def test_machines_that_are_none_are_refused(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--system", "pivot", "--model", "dense-9b", "--results", str(tmp_path), *more])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was started"

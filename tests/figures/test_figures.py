"""Figures are checked on their data; that they are drawn is checked on what is drawn, never on pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from harness.cli.figures import command
from harness.errors import BenchError, UsageError
from harness.results.summary import Share
from harness.results.tables import Recorded, intervals_table, open_runs, phases_table
from harness.runs.runner import RunResult, run
from paper_figures.registry import FIGURES
from paper_figures.side_by_side import side_by_side
from paper_figures.style import label_kind, save, system_style, theme
from systems.policies import SYSTEMS
from tests.conftest import small_spec

ALLOWED = frozenset({"staleness"})  # systems at their own bounds, as in the paper


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of every system, simulated."""
    root = tmp_path_factory.mktemp("runs")
    for system in SYSTEMS:
        for seed in (0, 1):
            run(small_spec(system, steps=2, seed=seed), root)
    return root


@pytest.fixture(scope="module")
def runs(results: Path) -> list[Recorded]:
    return open_runs(results)


def altered(recorded: Recorded, **summary: object) -> Recorded:
    return Recorded(recorded.directory, {**recorded.summary, **summary})


def test_throughput_has_what_the_summaries_have(runs: list[Recorded]) -> None:
    table = FIGURES["throughput"].data(runs).set_index("run")
    assert len(table) == len(runs) == 2 * len(SYSTEMS)
    for recorded in runs:
        row, tokens = table.loc[recorded.id], recorded.summary["tokens_per_s"]
        assert row["total_tokens_per_s"] == pytest.approx(tokens["total"])
        assert row["policy_tokens_per_s"] + row["judge_tokens_per_s"] == pytest.approx(tokens["total"])
        assert row["kind"] == "simulated"
    assert list(table["system"].unique()) == list(SYSTEMS)


def test_bars_are_the_means_of_the_table(runs: list[Recorded]) -> None:
    theme()
    table = FIGURES["throughput"].data(runs)
    axis = FIGURES["throughput"].draw(table).axes[0]
    tops = sorted({round(bar.get_y() + bar.get_height(), 3) for bar in axis.patches})  # type: ignore[attr-defined]
    means = table.groupby("system", observed=True)[["policy_tokens_per_s", "total_tokens_per_s"]].mean()
    assert tops == pytest.approx(sorted(means.to_numpy().ravel()), abs=0.01)


def test_intervals_add_up_to_the_shares_of_the_summary(runs: list[Recorded]) -> None:
    for recorded in runs:
        table, makespan = intervals_table(recorded), recorded.summary["makespan_s"]
        spent = table["end_s"].clip(upper=makespan) - table["start_s"].clip(upper=makespan)
        shares = spent.groupby(table["share"]).sum() / (makespan * recorded.summary["gpus"])
        for share in [share for share in Share if share is not Share.IDLE]:
            assert shares.get(share, 0.0) == pytest.approx(recorded.summary["gpu_time_share"][share])
        for _, of_device in table.groupby("device"):
            assert (of_device["start_s"].iloc[1:].to_numpy() >= of_device["end_s"].iloc[:-1].to_numpy()).all()


def test_phases_are_those_of_the_shifts_that_took_devices(runs: list[Recorded]) -> None:
    for recorded in runs:
        table = phases_table(recorded)
        assert table["shift"].nunique() == recorded.summary["shifts"]
        if not table.empty:
            assert set(table["phase"]) == {"drain", "park", "release", "load", "warm", "ready"}
            assert (table.groupby("shift").size() == 6).all()
            load = table[(table["phase"] == "load") & (table["target"] != "none")]
            assert (load["seconds"] > 0).all()
    assert any(not phases_table(recorded).empty for recorded in runs)


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_data_gives_the_same_bytes(name: str, runs: list[Recorded], tmp_path: Path) -> None:
    theme()
    written = []
    for place in ("one", "two"):
        table = FIGURES[name].data(runs)
        figure = FIGURES[name].draw(table)
        label_kind(figure, "simulated")
        assert "simulated" in [text.get_text() for text in figure.texts]
        written.append([path.read_bytes() for path in save(figure, table, tmp_path / place, name)])
    assert written[0] == written[1]
    assert len(pd.read_csv(tmp_path / "one" / f"{name}.csv")) == len(FIGURES[name].data(runs))


def test_kinds_are_not_mixed(runs: list[Recorded]) -> None:
    assert {run.kind for run in side_by_side(runs, ALLOWED).runs} == {"simulated"}
    directory = runs[5].directory
    measured = replace(directory, manifest={**directory.manifest, "kind": "measured"})
    mixed = [*runs[:5], replace(runs[5], directory=measured, given=runs[5].summary)]
    with pytest.raises(UsageError, match="these runs is measured and simulated"):
        side_by_side(mixed, ALLOWED)


def test_what_is_not_comparable_is_not_drawn(results: Path, runs: list[Recorded], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="oversubscribed"):
        side_by_side([altered(runs[0], oversubscribed=True)], ALLOWED)
    longer: RunResult = run(small_spec(steps=3), tmp_path)
    with pytest.raises(UsageError, match="differ in steps"):
        side_by_side([*runs, Recorded(longer.directory, longer.summary)], ALLOWED)
    of = {name: [one for one in runs if one.spec["system"] == name] for name in SYSTEMS}
    with pytest.raises(UsageError, match="no seed in common"):
        side_by_side([of["colocated"][0], of["pivot"][1]], ALLOWED)
    shown = side_by_side([of["colocated"][0], of["pivot"][1]], ALLOWED | {"seeds"})
    assert "not all of them ran the same seeds" in shown.notes
    other = run(small_spec("pivot", steps=2, seed=1, staleness=0), tmp_path).directory
    with pytest.raises(UsageError, match="staleness bounds 0 and 2, which are not replicates"):
        side_by_side([*of["pivot"], Recorded(other)], ALLOWED)


def test_unequal_bounds_need_a_choice_and_have_a_mark(runs: list[Recorded], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\(bounds .*\), so asynchrony would be in the comparison"):
        side_by_side(runs, frozenset())
    shown = side_by_side(runs, ALLOWED)
    assert shown.notes == ("UNEQUAL STALENESS (bounds 0, 2): asynchrony is in it",)
    elsewhere = Recorded(run(small_spec("pivot", "moe-30b", steps=2, seed=0), tmp_path).directory)
    colocated = next(one for one in runs if one.spec["system"] == "colocated")
    with pytest.raises(UsageError, match="unequal staleness bounds"):
        side_by_side([colocated, elsewhere], frozenset())
    equal = [one for one in runs if one.spec["system"] == "pivot"]
    assert side_by_side(equal, frozenset()).notes == ()
    apart = {**equal[1].summary["realised_staleness"], "mean": 0.0}
    unequal = [equal[0], with_system(altered(equal[1], realised_staleness=apart, seed=0), "disaggregated")]
    with pytest.raises(UsageError, match="asynchrony"):
        side_by_side(unequal, frozenset({"seeds"}))
    assert any("asynchrony is in it" in note for note in side_by_side(unequal, ALLOWED | {"seeds"}).notes)


def with_system(recorded: Recorded, system: str) -> Recorded:
    directory = recorded.directory
    spec = {**directory.manifest["spec"], "system": system}
    return replace(recorded, directory=replace(directory, manifest={**directory.manifest, "spec": spec}))


def test_a_run_that_is_there_twice_is_drawn_once(runs: list[Recorded]) -> None:
    one = [run for run in runs if run.spec["system"] == "pivot"]
    shown = side_by_side([one[0], *one], frozenset())
    assert [run.id for run in shown.runs] == [run.id for run in (one[0], *one)] or len(shown.runs) <= 3
    assert any("the newest of 2 equal runs of a seed" in note for note in shown.notes)


def test_a_bar_says_its_bound_and_what_was_realised(runs: list[Recorded]) -> None:
    theme()
    axis = FIGURES["throughput"].draw(FIGURES["throughput"].data(runs)).axes[0]
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels[0] == "colocated\nbound 0\nrealised 0.00"
    assert [label.splitlines()[1] for label in labels] == [
        f"bound {kind.default_staleness}" for kind in SYSTEMS.values()
    ]


def test_the_command(results: Path, tmp_path: Path) -> None:
    invoke = CliRunner().invoke
    given = ["--results", str(results), "--out", str(tmp_path)]
    done = invoke(command, [*FIGURES, *given, "--allow", "staleness"], catch_exceptions=False)
    assert len(done.output.splitlines()) == 9
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{ending}" for name in FIGURES for ending in ("pdf", "png", "csv")
    }
    for arguments, says in (
        (["throughputs", *given], "did you mean 'throughput'"),
        (["timeline", *given, "--kind", "measurd"], "did you mean 'measured'"),
        (["timeline", *given, "--kind", "measured"], "no complete measured run"),
        (["timeline", *given, "--run", "nowhere"], "no run match"),
    ):
        with pytest.raises(BenchError, match=says):
            invoke(command, arguments, catch_exceptions=False)


def test_every_system_has_a_style_of_its_own() -> None:
    styles = [system_style(name) for name in SYSTEMS]
    assert len(set(styles)) == len(styles)
    assert system_style("somebody's own") not in styles

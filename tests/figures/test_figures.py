"""Figures are checked on their data; that they are drawn is checked on what is drawn, never on pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from harness.cli.figures import command
from harness.errors import BenchError, UsageError
from harness.results.summary import SHARES
from harness.results.tables import Recorded, intervals_table, one_kind, open_runs, phases_table
from harness.runs.runner import RunResult, run
from paper_figures.registry import FIGURES
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
    table = FIGURES["throughput"].data(runs, ALLOWED).set_index("run")
    assert len(table) == len(runs) == 6
    for recorded in runs:
        row, tokens = table.loc[recorded.id], recorded.summary["tokens_per_s"]
        assert row["total_tokens_per_s"] == pytest.approx(tokens["total"])
        assert row["policy_tokens_per_s"] + row["judge_tokens_per_s"] == pytest.approx(tokens["total"])
        assert row["kind"] == "simulated"
    assert list(table["system"].unique()) == list(SYSTEMS)


def test_bars_are_the_means_of_the_table(runs: list[Recorded]) -> None:
    theme()
    table = FIGURES["throughput"].data(runs, ALLOWED)
    axis = FIGURES["throughput"].draw(table).axes[0]
    tops = sorted({round(bar.get_y() + bar.get_height(), 3) for bar in axis.patches})  # type: ignore[attr-defined]
    means = table.groupby("system", observed=True)[["policy_tokens_per_s", "total_tokens_per_s"]].mean()
    assert tops == pytest.approx(sorted(means.to_numpy().ravel()), abs=0.01)


def test_intervals_add_up_to_the_shares_of_the_summary(runs: list[Recorded]) -> None:
    for recorded in runs:
        table, makespan = intervals_table(recorded), recorded.summary["makespan_s"]
        spent = table["end_s"].clip(upper=makespan) - table["start_s"].clip(upper=makespan)
        shares = spent.groupby(table["share"]).sum() / (makespan * recorded.summary["gpus"])
        for share in SHARES[:-1]:
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
        table = FIGURES[name].data(runs, ALLOWED)
        figure = FIGURES[name].draw(table)
        label_kind(figure, "simulated")
        assert "simulated" in [text.get_text() for text in figure.texts]
        written.append([path.read_bytes() for path in save(figure, table, tmp_path / place, name)])
    assert written[0] == written[1]
    assert len(pd.read_csv(tmp_path / "one" / f"{name}.csv")) == len(FIGURES[name].data(runs, ALLOWED))


def test_kinds_are_not_mixed(runs: list[Recorded]) -> None:
    assert one_kind(runs) == "simulated"
    directory = runs[5].directory
    measured = replace(directory, manifest={**directory.manifest, "kind": "measured"})
    mixed = [*runs[:5], replace(runs[5], directory=measured)]
    with pytest.raises(UsageError, match=r"several kinds \(1 measured, 5 simulated\)"):
        one_kind(mixed)


def test_throughput_refuses_what_is_not_comparable(
    results: Path, runs: list[Recorded], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="oversubscribed"):
        FIGURES["throughput"].data([altered(runs[0], oversubscribed=True)], ALLOWED)
    longer: RunResult = run(small_spec(steps=3), tmp_path)
    with pytest.raises(UsageError, match="differ in steps"):
        FIGURES["throughput"].data([*runs, Recorded(longer.directory, longer.summary)], ALLOWED)


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

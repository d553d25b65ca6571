"""Comparisons of recorded runs: pairs, refusals, claims, exports, and summaries of an older schema."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.errors import BenchError, UsageError
from harness.results.export import export
from harness.results.record import RunDirectory
from harness.results.summary import CUT_OFF
from harness.results.tables import Recorded, migrated, open_runs, read_summary
from harness.runs.runner import run
from harness.studies.claims import ClaimsFile, Found, judge, read_claims, runs_of
from harness.studies.compare import Contrast, compare, condition, describe, select
from harness.studies.stats import Verdict
from tests.conftest import SMALL, small_spec

SEEDS = range(10)
TINY = ("workload.prompts=4", "workload.samples=4", "workload.mini_batches=1")
TRIALS = 100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colocated and pivot at a staleness of 0 on ten seeds."""
    results = tmp_path_factory.mktemp("runs")
    for seed in SEEDS:
        for system in ("colocated", "pivot"):
            run(small_spec(system, steps=2, seed=seed, staleness=0), results)
    return results


@pytest.fixture(scope="module")
def runs(root: Path) -> list[Recorded]:
    return open_runs(root)


def changed(runs: Sequence[Recorded], **fields: Any) -> list[Recorded]:
    """The same runs with other facts in their summaries."""
    return [replace(one, given={**one.summary, **fields}) for one in runs]


def sped_up(runs: Sequence[Recorded], factor: float) -> list[Recorded]:
    """As if every run of pivot had been colocated's, that much faster, give or take 2 %."""
    found = []
    for one in runs:
        if one.spec["system"] == "pivot":
            partner = next(r for r in runs if r.seed == one.seed and r.spec["system"] == "colocated")
            wobble = 1 + 0.02 * math.sin(7 * one.seed)
            tokens = {key: value * factor * wobble for key, value in partner.summary["tokens_per_s"].items()}
            one = replace(one, given={**partner.summary, "tokens_per_s": tokens, "system": "pivot"})
        found.append(one)
    return found


def only(found: list[Contrast]) -> Contrast:
    (one,) = found
    return one


def test_a_planted_five_percent_is_found_seed_by_seed(runs: list[Recorded]) -> None:
    found = only(compare(sped_up(runs, 1.05), ["colocated", "pivot"]))
    assert found.effect.verdict is Verdict.FASTER
    assert found.effect.ratio == pytest.approx(1.05, abs=0.02)
    assert (found.effect.n, found.effect.paired, found.kind) == (10, True, "simulated")
    assert sorted(found.by_seed) == list(SEEDS)
    assert only(compare(sped_up(runs, 1.05), ["pivot", "colocated"])).effect.verdict is Verdict.SLOWER


def test_a_system_against_itself_is_inconclusive(runs: list[Recorded]) -> None:
    found = only(compare(runs, ["pivot", "shiftable"]))
    assert found.effect.verdict is Verdict.INCONCLUSIVE
    assert found.effect.ratio == 1


def test_halves_of_the_same_runs_are_rarely_told_apart(tmp_path: Path) -> None:
    """100 runs of one system; 100 times two halves of them, as pairs and as independent runs."""
    for seed in range(100):
        run(small_spec("colocated", steps=1, seed=seed, staleness=0, settings=TINY), tmp_path)
    pool, rng = open_runs(tmp_path), random.Random(0)
    wrong = {"pairs": 0, "independent": 0}
    for _ in range(TRIALS):
        rng.shuffle(pool)
        halves = [numbered(pool[:50], "colocated", 0), numbered(pool[50:], "pivot", 0)]
        found = only(compare([*halves[0], *halves[1]], ["colocated", "pivot"]))
        wrong["pairs"] += found.effect.verdict is not Verdict.INCONCLUSIVE
        apart = [*halves[0], *numbered(pool[50:], "pivot", 100)]
        found = only(compare(apart, ["colocated", "pivot"], allow=frozenset({"seeds"})))
        assert not found.effect.paired
        wrong["independent"] += found.effect.verdict is not Verdict.INCONCLUSIVE
    assert max(wrong.values()) <= 0.07 * TRIALS, wrong


def numbered(runs: Sequence[Recorded], system: str, first: int) -> list[Recorded]:
    """The same runs as if they were a system's, with seeds in this order."""
    found = []
    for seed, one in enumerate(runs, first):
        manifest = one.directory.manifest
        spec = {**manifest["spec"], "seed": seed, "system": system}
        directory = replace(one.directory, manifest={**manifest, "spec": spec})
        found.append(replace(one, directory=directory, given=one.summary))
    return found


def test_halves_without_common_seeds_are_refused_or_independent(runs: list[Recorded]) -> None:
    halves = ["pivot,seed=1", "pivot,seed=2"]
    with pytest.raises(UsageError, match="no seed in common"):
        compare(runs, halves)
    found = only(compare(runs, halves, allow=frozenset({"seeds"})))
    assert not found.effect.paired
    assert found.effect.verdict is Verdict.INCONCLUSIVE


def test_simulated_against_measured_is_refused(runs: list[Recorded]) -> None:
    mixed = [as_measured(one) if one.spec["system"] == "pivot" else one for one in runs]
    with pytest.raises(UsageError, match="colocated is simulated, pivot is measured"):
        compare(mixed, ["colocated", "pivot"])
    allowed = only(compare(mixed, ["colocated", "pivot"], allow=frozenset({"kind"})))
    assert "colocated is simulated, pivot is measured" in allowed.notes
    sides = allowed.to_json()
    assert (sides["baseline"]["kind"], sides["contender"]["kind"]) == ("simulated", "measured")


def test_sides_that_are_mixed_in_themselves_are_refused(runs: list[Recorded]) -> None:
    """Both are "measured and simulated", so they are equal, and still no comparison."""
    mixed = [as_measured(one) if one.seed % 2 else one for one in runs]
    both = "measured and simulated"
    with pytest.raises(UsageError, match=f"colocated is {both}, pivot is {both}"):
        compare(mixed, ["colocated", "pivot"])


def as_measured(run: Recorded) -> Recorded:
    manifest = {**run.directory.manifest, "kind": "measured"}
    return replace(run, directory=replace(run.directory, manifest=manifest), given=run.summary)


def test_oversubscribed_runs_are_not_compared(runs: list[Recorded]) -> None:
    crowded = changed(runs, oversubscribed=True)
    with pytest.raises(UsageError, match="more workers than cores"):
        compare(crowded, ["colocated", "pivot"])
    allowed = only(compare(crowded, ["colocated", "pivot"], allow=frozenset({"oversubscribed"})))
    assert "20 runs had more workers than cores" in allowed.notes


def test_workloads_of_one_side_are_left_out_aloud(runs: list[Recorded], tmp_path: Path) -> None:
    settings = (*SMALL, "lengths.response_median=700")
    run(small_spec("colocated", steps=2, seed=1, staleness=0, settings=settings), tmp_path)
    found = only(compare([*runs, *open_runs(tmp_path)], ["colocated", "pivot"]))
    assert found.effect.n == 10
    assert any("only colocated has runs of it: " in n and "response_median=700" in n for n in found.notes)


def test_one_pair_is_valid_json(runs: list[Recorded]) -> None:
    one = only(compare(runs, ["colocated,seed=1", "pivot,seed=1"])).to_json()
    assert (one["high"], one["p"]) == (None, None)
    json.dumps(one, allow_nan=False)


def test_unequal_staleness_is_refused_unless_allowed(runs: list[Recorded]) -> None:
    stale = [
        replace(one, given={**one.summary, "realised_staleness": {"mean": 1.0, "max": 2}})
        if one.spec["system"] == "pivot"
        else one
        for one in runs
    ]
    with pytest.raises(UsageError, match=r"pivot realised a staleness of 1.00, colocated one of 0.00"):
        compare(stale, ["colocated", "pivot"])
    with pytest.raises(UsageError, match=r"colocated realised a staleness of 0.00, pivot one of 1.00"):
        compare(stale, ["pivot", "colocated"])
    found = only(compare(stale, ["colocated", "pivot"], allow=frozenset({"staleness"})))
    assert any("asynchrony is in it" in note for note in found.notes)


@pytest.mark.parametrize(("mean", "refused"), [(0.1, False), (0.11, True)])
def test_realised_staleness_may_differ_by_a_tenth(runs: list[Recorded], mean: float, refused: bool) -> None:
    stale = [
        replace(one, given={**one.summary, "realised_staleness": {"mean": mean, "max": 1}})
        if one.spec["system"] == "pivot"
        else one
        for one in runs
    ]
    if refused:
        with pytest.raises(UsageError, match="asynchrony"):
            compare(stale, ["colocated", "pivot"])
    else:
        assert only(compare(stale, ["colocated", "pivot"])).effect.n == 10


def test_unequal_bounds_are_refused_even_if_the_same_was_realised(runs: list[Recorded]) -> None:
    bound = [with_spec(one, staleness=2) if one.spec["system"] == "pivot" else one for one in runs]
    with pytest.raises(UsageError, match=r"\(bounds 2, 0\)"):
        compare(bound, ["colocated", "pivot"])
    assert only(compare(bound, ["colocated", "pivot"], allow=frozenset({"staleness"}))).effect.n == 10


def with_spec(run: Recorded, **fields: Any) -> Recorded:
    manifest = run.directory.manifest
    changed = {**manifest, "spec": {**manifest["spec"], **fields}}
    return replace(run, directory=replace(run.directory, manifest=changed), given=run.summary)


def test_too_few_pairs_say_that_no_verdict_was_possible(runs: list[Recorded]) -> None:
    few = [one for one in sped_up(runs, 1.5) if one.seed < 5]
    found = only(compare(few, ["colocated", "pivot"]))
    assert found.effect.verdict is Verdict.INCONCLUSIVE
    assert any("no verdict was possible: with 5 pairs" in note for note in found.notes)
    enough = only(compare([one for one in sped_up(runs, 1.5) if one.seed < 6], ["colocated", "pivot"]))
    assert enough.effect.verdict is Verdict.FASTER
    assert not any("no verdict" in note for note in enough.notes)


def test_other_workloads_are_refused_with_what_differs(runs: list[Recorded], tmp_path: Path) -> None:
    settings = (*SMALL, "lengths.response_median=700")
    run(small_spec("pivot", steps=2, seed=1, staleness=0, settings=settings), tmp_path)
    both = [*(one for one in runs if one.spec["system"] == "colocated"), *open_runs(tmp_path)]
    with pytest.raises(UsageError, match=r"lengths.response_median \(1500.0, 700.0\)"):
        compare(both, ["colocated", "pivot"])
    found = only(compare(both, ["colocated", "pivot"], allow=frozenset({"workload"})))
    assert found.effect.n == 1
    assert any("colocated ran another workload: dense-9b 2 steps" in note for note in found.notes)
    assert "lengths.response_median=700" in describe(open_runs(tmp_path)[0])


def test_runs_of_one_seed_that_differ_must_be_told_apart(runs: list[Recorded], tmp_path: Path) -> None:
    run(small_spec("pivot", steps=2, seed=1, staleness=2), tmp_path)
    both = [*runs, *open_runs(tmp_path)]
    with pytest.raises(UsageError, match=r"differ in staleness \(0 and 2\).*staleness=2"):
        compare(both, ["colocated", "pivot"])
    assert only(compare(both, ["colocated", "pivot,staleness=0"])).effect.n == 10


@pytest.mark.parametrize(
    ("selections", "says"),
    [
        (["pivot"], "needs a baseline and at least one other"),
        (["pivot", "pivto"], "'pivto' is no system, no key=value and no part of a run's name"),
        (["pivot", "systm=pivot"], "did you mean 'system'?"),
        (["pivot", "seed=77"], "no run with seed=77; there are: 0, 1"),
        (["pivot", "lengths.response_medan=3"], "did you mean 'lengths.response_median'?"),
    ],
)
def test_selections_are_checked(runs: list[Recorded], selections: list[str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        compare(runs, selections)
    assert says in str(error.value)


def test_selections_by_run_and_value(runs: list[Recorded]) -> None:
    assert len(select(runs, "pivot,seed=3")) == 1
    assert len(select(runs, "lengths.response_median=1500")) == 20
    assert select(runs, runs[0].id) == [runs[0]]


def test_equal_staleness_is_equal_wherever_it_is(runs: list[Recorded]) -> None:
    stale = changed(runs, realised_staleness={"mean": 1.5, "max": 2})
    assert only(compare(stale, ["colocated", "pivot"])).effect.n == 10


def test_speed_is_one_over_the_makespan(runs: list[Recorded]) -> None:
    slower = [
        replace(one, given={**one.summary, "makespan_s": 4.0 if one.spec["system"] == "pivot" else 2.0})
        for one in runs
    ]
    assert only(compare(slower, ["colocated", "pivot"], "speed")).effect.ratio == pytest.approx(0.5)


def test_runs_without_a_partner_are_left_out_aloud(runs: list[Recorded]) -> None:
    kept = [one for one in runs if one.spec["system"] == "colocated" or one.seed < 7]
    kept = [one for one in kept if one.spec["system"] == "pivot" or one.seed > 0]
    found = only(compare(kept, ["colocated", "pivot"]))
    assert found.effect.n == 6
    assert "4 runs have no partner of their seed and machine and are left out" in found.notes


def test_the_newest_of_equal_runs_counts_and_that_is_said(runs: list[Recorded]) -> None:
    first = next(one for one in runs if one.spec["system"] == "pivot" and one.seed == 3)
    again = replace(
        first, given={**first.summary, "tokens_per_s": dict.fromkeys(first.summary["tokens_per_s"], 7.0)}
    )
    found = only(compare([*runs, again, again], ["colocated", "pivot"]))
    assert "pivot: the newest of 3 equal runs of a seed" in found.notes
    base = next(one for one in runs if one.spec["system"] == "colocated" and one.seed == 3)
    assert found.by_seed[3] == pytest.approx(7.0 / base.summary["tokens_per_s"]["total"])


def test_a_condition_above(runs: list[Recorded]) -> None:
    faster, same = (only(compare(sped_up(runs, by), ["colocated", "pivot"])) for by in (1.2, 1.0))
    assert condition("throughput>5%").holds(faster)
    assert not condition("throughput>5%").holds(same)
    assert not condition("throughput>150%").holds(faster)


def test_conditions(runs: list[Recorded]) -> None:
    slower = only(compare(sped_up(runs, 0.9), ["colocated", "pivot"]))
    assert condition("throughput<-5%").holds(slower)
    assert not condition("throughput<-15%").holds(slower)
    assert condition(" throughput > -20 %").holds(slower)
    assert condition("throughput.high<-5%").holds(slower)
    assert slower.effect.low < 0.9 < slower.effect.high
    between = 100 * ((slower.effect.ratio + slower.effect.high) / 2 - 1)
    assert condition(f"throughput<{between:.3f}%").holds(slower)
    assert not condition(f"throughput.high<{between:.3f}%").holds(slower)
    assert condition(f"throughput.low<{between:.3f}%").holds(slower)
    said = condition("throughput<-5%").said(slower)
    assert "95 % interval" in said
    assert "the condition is of the point estimate" in said
    assert "of the interval's high end" in condition("throughput.high<-5%").said(slower)
    single = only(compare(runs, ["colocated,seed=1", "pivot,seed=1"]))
    for end in ("low", "high"):
        with pytest.raises(UsageError, match=r"1 pair on .* which is too few for an interval"):
            condition(f"throughput.{end}<-5%").holds(single)
    assert "no interval" in condition("throughput<5%").said(single)
    for text in ("throughput", "throughput<5", "thruput<5%", "throughput.middle<5%"):
        with pytest.raises(UsageError):
            condition(text)


# ------------------------------------------------------------------------------------------- claims


def claims_of(tmp_path: Path, low: float, high: float) -> Path:
    settings = "\n".join(f'"{k}" = {v}' for k, v in (setting.split("=") for setting in SMALL))
    (tmp_path / "study.toml").write_text(
        f'steps = 2\nseeds = {list(SEEDS)}\n[[grid]]\nsystem = ["colocated", "pivot"]\nmodel = "dense-9b"\n'
        f"staleness = 0\ngpus = 8\n[grid.set]\n{settings}\n"
    )
    (tmp_path / "claims.toml").write_text(
        f'frozen_in = "abc"\n[[claim]]\nid = "gain"\ntext = "a gain"\nsource = "abstract"\nlow = {low}\n'
        f'high = {high}\nsuite = "{tmp_path / "study.toml"}"\n[claim.ratio]\nof = "pivot"\nto = "colocated"\n'
        '[[claim]]\nid = "other"\ntext = "another"\nsource = "abstract"\nuntested = "not there"\n'
    )
    return tmp_path / "claims.toml"


@pytest.mark.parametrize(
    ("factor", "low", "high", "verdict"),
    [
        (1.9, 1.8, 2.0, Found.REPRODUCED),
        (1.2, 1.8, 2.0, Found.PARTLY),
        (2.5, 1.8, 2.0, Found.PARTLY),
        (1.0, 1.8, 2.0, Found.NOT_REPRODUCED),
        (0.8, 1.8, 2.0, Found.NOT_REPRODUCED),
    ],
)
def test_a_claim_comes_out_or_does_not(
    runs: list[Recorded], factor: float, low: float, high: float, verdict: Found, tmp_path: Path
) -> None:
    file = read_claims(claims_of(tmp_path, low, high))
    gain, other = judge(file, by_cell(file, sped_up(runs, factor)), tmp_path)
    assert gain.verdict is verdict
    assert gain.effect is not None
    assert gain.effect.ratio == pytest.approx(factor, rel=0.02)
    assert len(gain.parts[0].contender.runs) == 10
    assert gain.command.startswith("bench sweep ")
    assert (other.verdict, other.why) == (Found.NOT_TESTED, "not there")
    assert json.loads(json.dumps(gain.to_json()))["frozen_in"] == "abc"


def test_a_claim_that_something_is_slower(runs: list[Recorded], tmp_path: Path) -> None:
    file = read_claims(claims_of(tmp_path, 0.4, 0.6))
    for factor, verdict in ((0.5, Found.REPRODUCED), (0.8, Found.PARTLY), (1.5, Found.NOT_REPRODUCED)):
        row = judge(file, by_cell(file, sped_up(runs, factor)), tmp_path)[0]
        assert row.verdict is verdict


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfe", "can't decode"), (b"frozen_in = ", "value"), (b'frozen_in = "x"\nclaim = []', "claim")],
)
def test_claims_that_cannot_be_read_are_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_claims(path)
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value).lower()
    with pytest.raises(UsageError, match="No such file"):
        read_claims(tmp_path / "nothing.toml")


def by_cell(file: ClaimsFile, runs: Sequence[Recorded]) -> dict[str, dict[str, Recorded]]:
    cells = {str(run.directory.manifest["cell"]): run for run in runs}
    return {claim.suite: cells for claim in file.claim if claim.suite}


@pytest.mark.parametrize(("seeds", "wobble"), [(1, 0.0), (5, 0.0), (10, 0.9)])
def test_an_interval_that_is_wide_reproduces_nothing(
    runs: list[Recorded], seeds: int, wobble: float, tmp_path: Path
) -> None:
    """Few seeds and noisy ones overlap every range."""
    path = claims_of(tmp_path, 1.8, 2.0)
    study = tmp_path / "study.toml"
    study.write_text(study.read_text().replace(str(list(SEEDS)), str(list(range(seeds)))))
    noisy = []
    for one in sped_up(runs, 1.0):
        if one.spec["system"] == "pivot":
            factor = 1.3 * math.exp(wobble * math.sin(9 * one.seed))
            tokens = {key: value * factor for key, value in one.summary["tokens_per_s"].items()}
            one = replace(one, given={**one.summary, "tokens_per_s": tokens})
        noisy.append(one)
    row = judge(read_claims(path), by_cell(read_claims(path), noisy), tmp_path)[0]
    assert row.verdict is (Found.NOT_TESTED if seeds < 6 else Found.NOT_REPRODUCED)
    assert row.effect is not None


def test_a_claim_with_missing_runs_is_not_tested(runs: list[Recorded], tmp_path: Path) -> None:
    file = read_claims(claims_of(tmp_path, 1.8, 2.0))
    row = judge(file, by_cell(file, [one for one in runs if one.seed != 4]), tmp_path)[0]
    assert (row.verdict, row.effect) == (Found.NOT_TESTED, None)
    assert row.why.startswith("2 of 20 runs of")


def test_claims_count_runs_of_this_code_only(root: Path, runs: list[Recorded], tmp_path: Path) -> None:
    file = read_claims(claims_of(tmp_path, 1.8, 2.0))
    (found,) = runs_of(file, root).values()
    assert len(found) == 20
    copied = tmp_path / "other"
    shutil.copytree(root, copied)
    for path in copied.glob("*/manifest.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "code_sha256": "another"}))
    assert [len(found) for found in runs_of(file, copied).values()] == [0]
    assert [len(found) for found in runs_of(file, copied, any_code=True).values()] == [20]


def test_a_grid_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = claims_of(tmp_path, 1.8, 2.0)
    path.write_text(path.read_text().replace("[claim.ratio]", "grid = 7\n[claim.ratio]"))
    row = judge(read_claims(path), {}, tmp_path)[0]
    assert (row.verdict, row.why) == (Found.NOT_TESTED, "study has no grid 7")


def test_the_shipped_claims_can_be_judged(tmp_path: Path) -> None:
    file = read_claims()
    rows = judge(file, {}, tmp_path)
    assert {row.verdict for row in rows} == {Found.NOT_TESTED}
    assert {row.claim.id for row in rows} >= {"over-colocated", "over-disaggregated", "convergence"}


# ------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("missing", ["DONE", None])
def test_a_cell_is_done_once_its_run_is_marked_so(root: Path, missing: str | None, tmp_path: Path) -> None:
    """A manifest says "complete" a moment before the mark is there: a run that was killed between is not."""
    file = read_claims(claims_of(tmp_path, 1.8, 2.0))
    copied = tmp_path / "other"
    shutil.copytree(root, copied)
    if missing:
        next(copied.glob(f"*colocated*/{missing}")).unlink()
    (found,) = runs_of(file, copied).values()
    assert len(found) == (19 if missing else 20)


def test_summaries_of_an_older_schema_are_migrated(runs: list[Recorded]) -> None:
    new = runs[0].summary
    old = {**new, "summary_schema": 1, "provisional": True}
    assert migrated(old, "x") == new
    assert migrated(new, "x") is new
    for version in (0, 99):
        with pytest.raises(BenchError, match=f"schema {version}; this version reads 1 to"):
            migrated({**new, "summary_schema": version}, "x")


def as_of_schema_2(summary: dict[str, Any]) -> dict[str, Any]:
    """As the last version wrote it: without counts of what was cut off."""
    counts = ("responses", "judgements", *CUT_OFF)
    steps = [{key: value for key, value in step.items() if key not in counts} for step in summary["steps"]]
    kept = {key: value for key, value in summary.items() if key not in ("cut_off", "warnings")}
    return {**kept, "summary_schema": 2, "steps": steps}


def test_a_run_of_an_older_schema_is_read(root: Path, runs: list[Recorded], tmp_path: Path) -> None:
    manifest = {key: value for key, value in runs[0].directory.manifest.items() if key != "files"}
    directory = RunDirectory(tmp_path, manifest)
    old = {**as_of_schema_2(runs[0].summary), "summary_schema": 1, "provisional": True}
    shutil.copy(runs[0].directory.events_path, tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(old))
    read = read_summary(directory)
    assert read["summary_schema"] == 4
    assert read["tokens_per_s"] == runs[0].summary["tokens_per_s"]
    assert set(read["cut_off"].values()) == {None}, "what was not counted is unknown, not zero"
    assert directory.unverified is not None
    assert json.loads((tmp_path / "summary.json").read_text()) == old, "nothing on disk changes"


def test_exports(runs: list[Recorded], tmp_path: Path) -> None:
    one = runs[-1]
    written = {form: export(one, form, tmp_path) for form in ("csv", "parquet", "perfetto")}
    assert [path.name.split(".")[-2] for path in written["csv"]] == ["steps", "intervals", "phases", "events"]
    for csv, parquet in zip(written["csv"], written["parquet"], strict=True):
        assert len(pd.read_csv(csv)) == len(pd.read_parquet(parquet))
    intervals = pd.read_csv(written["csv"][1])
    trace = json.loads(written["perfetto"][0].read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(intervals)
    assert sum(s["dur"] for s in slices) == pytest.approx(
        1e6 * (intervals["end_s"] - intervals["start_s"]).sum()
    )
    assert {event["tid"] for event in slices} <= set(range(8))
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert named[:2] == ["node 0", "device 0"]
    assert trace["otherData"]["kind"] == "simulated"
    published = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert published == ["version 1 published", "version 2 published"]

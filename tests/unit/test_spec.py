"""A request survives its JSON form, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.runs.assemble import assemble
from harness.runs.replay import replay
from harness.runs.runner import run
from harness.runs.spec import RunSpec, resolve
from systems.policies import SYSTEMS
from tests.conftest import SMALL
from workloads.groups import group_names


def again(spec: RunSpec) -> RunSpec:
    return RunSpec.from_json(json.loads(json.dumps(spec.to_json())))


@pytest.mark.parametrize("model", group_names())
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_group_and_system_round_trips(system: str, model: str) -> None:
    spec = resolve(
        system=system, model=model, backend=None, steps=7, seed=5, staleness=1, gpus=None,
        settings=("workload.samples=4", "faults.losses=2"),
    )  # fmt: skip
    assert again(spec) == spec
    assert (again(spec).id, again(spec).digest, again(spec).name) == (spec.id, spec.digest, spec.name)
    other = spec.with_seed(6)
    assert other.digest == spec.digest
    assert other.id != spec.id


def traced(folder: Path) -> RunSpec:
    path = folder / "trace.csv"
    path.write_text("output_tokens,input_tokens,probability\n100,10,0.25\n3000,20,0.75\n")
    return resolve(
        system="pivot", model="dense-9b", backend=None, steps=1, seed=5, staleness=0, gpus=8, settings=SMALL,
        trace=path,
    )  # fmt: skip


def test_a_traced_request_keeps_its_rows(tmp_path: Path) -> None:
    spec = traced(tmp_path)
    assert again(spec) == spec
    assert again(spec).trace is not None
    same = assemble(again(spec)).workload.prompt(3)
    assert same == assemble(spec).workload.prompt(3)
    assert replay(run(spec, tmp_path / "runs").directory).differing == ()


def test_an_older_traced_request_has_lost_them(tmp_path: Path) -> None:
    raw = traced(tmp_path).to_json()
    raw["trace"] = {"file": "trace.csv", "sha256": raw["trace"]["sha256"]}
    assert RunSpec.from_json(raw).trace is None


def test_a_live_request_keeps_what_its_workers_cost() -> None:
    spec = resolve(
        system="pivot", model="tiny-dense", backend="live", steps=1, seed=5, staleness=0, gpus=2, settings=()
    )
    assert again(spec) == spec
    assert again(spec).calibration is not None

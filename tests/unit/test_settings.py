"""Every numeric setting of a model group at small legal values and at its largest: it runs, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import BenchError, UsageError
from harness.runs.assemble import assemble
from harness.runs.runner import run
from harness.runs.spec import resolve
from harness.studies.plan import plan
from workloads.groups import ModelGroup, load_group

TABLES = ("cluster", "costs", "workload", "lengths", "learning", "live", "faults")
SMALL = ("workload.prompts=2", "workload.samples=2", "workload.mini_batches=1")
READ = {  # tables that a backend reads, see `spec.UNREAD`
    "sim": {"cluster", "costs", "workload", "lengths", "faults"},
    "cosim": {"cluster", "costs", "workload", "learning", "faults"},
    "live": {"cluster", "workload", "learning", "live", "faults"},
}
# At their largest these ask for more work than a test has time for: such a run is assembled, not made.
MUCH_WORK = {"workload.prompts", "workload.samples", "workload.judge_calls", "cluster.gpus"}


def bounds(group: ModelGroup) -> Iterator[tuple[str, float, float]]:
    """(setting, smallest, largest) of every number in a group."""
    for table in TABLES:
        for name, field in type(getattr(group, table)).model_fields.items():
            value = getattr(getattr(group, table), name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = [m.ge for m in field.metadata if hasattr(m, "ge")]
                least += [m.gt for m in field.metadata if hasattr(m, "gt")]
                most = [m.le for m in field.metadata if hasattr(m, "le")]
                assert least, f"{table}.{name} has no smallest value"
                assert most, f"{table}.{name} has no largest value"
                yield f"{table}.{name}", least[0], most[0]


def cases() -> Iterator[tuple[str, str, str, float]]:
    for model, backend in (("dense-9b", "sim"), ("tiny-dense", "cosim"), ("tiny-dense", "live")):
        for key, least, most in bounds(load_group(model)):
            if key.split(".")[0] in READ[backend]:
                for value in dict.fromkeys((least, 1, 2, most)):
                    yield model, backend, key, value


def test_every_number_of_a_group_has_bounds() -> None:
    assert len(list(bounds(load_group("tiny-dense")))) > 30


def outcome(model: str, backend: str, key: str, value: float, root: Path) -> str:
    """`ran`, `assembled`, or the one line of the refusal; anything else is an error."""
    if backend != "sim":
        pytest.importorskip("torch")
    settings = (*(s for s in SMALL if not s.startswith(f"{key}=")), f"{key}={value:.17g}")
    try:
        spec = resolve(
            system="pivot", model=model, backend=backend, steps=1, seed=1, staleness=0,
            gpus=2 if backend == "live" else None, settings=settings,
        )  # fmt: skip
        parts = assemble(spec)
        if backend == "sim":
            plan(spec)
        if backend == "live" or (key in MUCH_WORK and value > 2):
            parts.backend.close()
            return "assembled"
        run(spec, root)
        return "ran"
    except BenchError as error:
        return str(error)


@pytest.mark.parametrize("table", TABLES)
def test_small_and_large_values_run_or_are_refused_in_one_line(table: str, tmp_path: Path) -> None:
    seen = {"ran": 0, "assembled": 0, "refused": 0}
    for model, backend, key, value in cases():
        if key.startswith(f"{table}."):
            said = outcome(model, backend, key, value, tmp_path)
            assert "\n" not in said, f"{model} {backend} {key}={value}"
            seen[said if said in seen else "refused"] += 1
    assert seen["ran"] or table == "live"


@pytest.mark.parametrize("value", range(1, 9))
def test_a_replica_of_few_sequences_runs(value: int, tmp_path: Path) -> None:
    """Where a batch is smaller than the planner's small batch, its line has one point."""
    assert outcome("dense-9b", "sim", "cluster.max_running", value, tmp_path) == "ran"


@pytest.mark.parametrize(
    ("model", "setting", "says"),
    [
        ("dense-9b", "costs.shift=1000", "counts as lost"),
        ("dense-9b", "costs.link=0.001", "counts as lost"),
        ("dense-9b", "costs.training=0.001", "a micro-batch of the longest sequences would take"),
        ("dense-9b", "workload.samples=1024", "sequences a step; at most 1048576"),
        ("tiny-dense", "learning.max_new_tokens=1024", "has 1024 positions; at most"),
        ("tiny-dense", "learning.judge_max_new_tokens=1024", "has 1024 positions; at most"),
        ("dense-9b", "cluster.max_running=100000", "less than or equal to 8192"),
    ],
)
def test_what_could_only_end_badly_is_refused(model: str, setting: str, says: str) -> None:
    more = ("workload.prompts=16384",) if "samples" in setting else ()
    with pytest.raises(UsageError, match=says):
        assemble(
            resolve(
                system="pivot", model=model, backend=None, steps=1, seed=1, staleness=0, gpus=None,
                settings=(setting, *more),
            )
        )  # fmt: skip


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize(("model", "backend"), [("dense-9b", "sim"), ("tiny-dense", "cosim")])
def test_several_judgements_that_end_at_one_moment_score_once(
    calls: int, model: str, backend: str, tmp_path: Path
) -> None:
    assert outcome(model, backend, "workload.judge_calls", calls, tmp_path) in ("ran", "assembled")


def test_two_equal_judgements_of_a_sample_run(tmp_path: Path) -> None:
    """A greedy judge writes the same judgement twice, in the same time."""
    pytest.importorskip("torch")
    spec = resolve(
        system="colocated", model="tiny-dense", backend=None, steps=1, seed=1, staleness=0, gpus=None,
        settings=(*SMALL, "workload.judge_calls=2"),
    )  # fmt: skip
    summary = run(spec, tmp_path).summary
    assert summary["cut_off"]["judgements"] == 2 * summary["cut_off"]["responses"] == 8

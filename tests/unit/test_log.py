"""What a run leaves on the disk is what was hashed, and whoever reads it finds out if it is not."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BenchError, InvalidRun, UnfitError, UsageError
from harness.results.export import export
from harness.results.log import EventLog, reading
from harness.results.record import DIED, RunDirectory, list_runs, read_manifest, reserve, unreadable
from harness.results.summary import Tally
from harness.results.tables import Recorded, intervals_table, open_runs, phases_table, read_summary
from harness.runs.code import code_sha256, deciding_files, files_sha256, reachable
from harness.runs.replay import replay
from harness.runs.runner import recompute, run
from harness.runs.spec import resolve
from systems.events import DeviceBack, Event, RunEnded, VersionPublished, decode
from systems.machine.files import file_sha256, replace_file, write_all
from tests.conftest import SMALL, small_spec


class Takes:
    """A raw file that takes at most so many bytes at a time, and none once it is full."""

    def __init__(self, at_a_time: int, space: int = 1 << 40) -> None:
        self.content = bytearray()
        self._at_a_time, self._space = at_a_time, space

    def write(self, data: memoryview) -> int | None:
        left = self._space - len(self.content)
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: min(self._at_a_time, left)])
        self.content += taken
        return len(taken)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_what_is_taken_in_parts_is_written_whole(data: bytes, at_a_time: int) -> None:
    file = Takes(at_a_time)
    write_all(file, data, Path("x"))
    assert bytes(file.content) == data


def test_a_full_disk_is_an_error_that_names_the_path() -> None:
    file = Takes(7, space=20)
    with pytest.raises(OSError, match="No space left") as error:
        write_all(file, b"x" * 100, Path("/somewhere/events.jsonl"))
    assert error.value.filename == "/somewhere/events.jsonl"
    assert len(file.content) == 20


@pytest.mark.parametrize("taken", [0, None])
def test_a_file_that_takes_nothing_is_an_error_not_a_loop(taken: int | None) -> None:
    class Stuck:
        def write(self, data: memoryview) -> int | None:
            return taken

    with pytest.raises(OSError, match="takes no more data"):
        write_all(Stuck(), b"x", Path("x"))


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    replace_file(path, "old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("systems.machine.files.write_all", full)
    with pytest.raises(OSError, match="No space left") as error:
        replace_file(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"], "nothing half-written is left"


# ------------------------------------------------------------------------------- a log under short writes


class Short:
    """A file that is for a while as full as `refuses` says, in place of a log's own."""

    def __init__(self, inner: Any, refuses: Callable[[int], bool], at_a_time: int = 50_000) -> None:
        self._inner, self._refuses, self._at_a_time, self._writes = inner, refuses, at_a_time, 0

    def write(self, data: Any) -> int:
        self._writes += 1
        if self._refuses(self._writes):
            raise OSError(errno.ENOSPC, "No space left on device")
        taken: int = self._inner.write(data[: self._at_a_time])
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def shortened(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int], bool]) -> None:
    usual = EventLog.__init__

    def init(self: EventLog, *args: Any) -> None:
        usual(self, *args)
        self._file = Short(self._file, refuses)  # type: ignore[assignment]

    monkeypatch.setattr(EventLog, "__init__", init)


def test_short_writes_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(small_spec(steps=2), tmp_path).summary["events_sha256"]
    shortened(monkeypatch, lambda write: False)
    result = run(small_spec(steps=2), tmp_path)
    assert file_sha256(result.directory.events_path) == result.summary["events_sha256"] == whole


@pytest.mark.parametrize("full_at", [1, 2, 3])
def test_a_briefly_full_disk_fails_the_run(
    full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is free again a moment later: what was lost meanwhile would be a hole."""
    shortened(monkeypatch, lambda write: write == full_at)
    with pytest.raises(UnfitError, match="No space left") as error:
        run(small_spec(steps=3), tmp_path)
    (path,) = tmp_path.glob("*/events.jsonl")
    assert str(path) in str(error.value)
    directory = RunDirectory.open(tmp_path, path.parent.name)
    assert directory.status == "failed"
    assert "No space left on device" in directory.manifest["reason"]
    assert not (path.parent / "DONE").exists()
    assert directory.manifest["files"] == {}, "nobody vouches for a log with a hole"
    assert "without a seal of its own" in str(directory.unverified)
    with pytest.raises(BenchError):
        open_runs(tmp_path)


def test_a_log_that_was_changed_while_it_was_written_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = EventLog.close

    def close(self: EventLog) -> None:
        usual(self)
        self.path.write_bytes(self.path.read_bytes().replace(b'"tokens":1', b'"tokens":9', 1))

    monkeypatch.setattr(EventLog, "close", close)
    with pytest.raises(InvalidRun, match="is not what was written to it"):
        run(small_spec(steps=1), tmp_path)
    (directory,) = (
        RunDirectory.open(tmp_path, path.parent.name) for path in tmp_path.glob("*/manifest.json")
    )
    assert directory.status == "invalid"


@pytest.mark.parametrize("what", ["write_summary", "check"])
def test_what_fails_at_the_end_is_sealed_as_well(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "summary.json")

    monkeypatch.setattr(
        *((RunDirectory, what) if what == "write_summary" else ("harness.runs.runner.check",)), full
    )
    with pytest.raises(UnfitError, match=r"summary.json: No space left"):
        run(small_spec(steps=1), tmp_path)
    (manifest,) = filter(None, map(read_manifest, tmp_path.glob("*/manifest.json")))
    assert manifest["status"] == "failed"
    assert manifest["reason"].startswith("OSError: [Errno 28]")


def test_reporting_that_fails_does_not_end_a_run(tmp_path: Path) -> None:
    def broken(_: Any) -> None:
        raise UnicodeError("nobody can print that")

    result = run(small_spec(steps=2), tmp_path, started=broken, stepped=broken)
    assert result.directory.status == "complete"


WITHOUT_ASSERTS = """
from harness.studies.stats import compare_paired
from systems.lifecycle import IllegalTransition
from systems.staleness import Admission
from tests.unit.test_staleness import group, recipe
assert False, "this is not -O"
admission, found = Admission(recipe(2, 0)), []
for wrong in (
    lambda: admission.score(group(0, 0)), lambda: admission.take(0),
    lambda: compare_paired({1: 1.0}, {2: 1.0}),
):
    try:
        wrong()
    except (IllegalTransition, ValueError) as error:
        found.append(type(error).__name__)
one = group(0, 0)
admission.admit(one)
admission.score(one)
try:
    admission.score(one)
except IllegalTransition as error:
    found.append("twice")
print(*found)
"""


def test_what_protects_a_result_holds_without_asserts() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT_ASSERTS], capture_output=True, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["IllegalTransition", "IllegalTransition", "ValueError", "twice"], (
        done.stderr
    )


# ------------------------------------------------------------------------------- seals


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed")
    run(small_spec(steps=2), root)
    return root


def copy_of(sealed: Path, tmp_path: Path) -> RunDirectory:
    (path,) = (entry for entry in sealed.iterdir() if entry.is_dir())
    copied = tmp_path / "runs" / path.name
    copied.mkdir(parents=True)
    for file in path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return RunDirectory.open(tmp_path / "runs", path.name)


def test_a_seal_has_the_digests_of_all_files(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    names = ("events.jsonl", "steps.parquet", "summary.json")
    assert directory.manifest["files"] == {name: file_sha256(directory.path / name) for name in names}
    assert directory.unverified is None
    directory.check()


READERS: dict[str, Callable[[RunDirectory], Any]] = {
    "summary": read_summary,
    "recompute": recompute,
    "replay": replay,
    "intervals": lambda directory: intervals_table(Recorded(directory)),
    "phases": lambda directory: phases_table(Recorded(directory)),
    "export": lambda directory: export(Recorded(directory), "csv", directory.path.parent / "out"),
}


@pytest.mark.parametrize("name", ["events.jsonl", "steps.parquet", "summary.json"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_notice_what_was_changed_or_is_gone(
    reader: str, name: str, sealed: Path, tmp_path: Path
) -> None:
    """Whatever of a run they use: a summary is worth no more than the log that it was made from."""
    for number, spoil in enumerate((doubled, lambda path: path.unlink())):
        directory = copy_of(sealed, tmp_path / str(number))
        spoil(directory.path / name)
        with pytest.raises(InvalidRun) as error:
            READERS[reader](directory)
        assert str(directory.path / name) in str(error.value)
        assert error.value.code == 5


def doubled(path: Path) -> None:
    """One number is twice what it was."""
    if path.suffix == ".parquet":
        path.write_bytes(path.read_bytes()[::-1])
        return
    text = path.read_text()
    key = '"tokens":' if path.name == "events.jsonl" else '"makespan_s": '
    before, _, after = text.partition(key)
    number = after.split(",")[0].split("}")[0]
    path.write_text(before + key + repr(float(number) * 2) + after[len(number) :])


def test_an_older_seal_vouches_for_the_log_alone(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    del directory.manifest["files"]
    doubled(directory.path / "summary.json")
    directory.check()
    assert "kept no digests" in str(directory.unverified)
    doubled(directory.events_path)
    with pytest.raises(InvalidRun, match=r"events.jsonl is not the file"):
        recompute(directory)


def test_a_digest_that_is_printed_is_of_what_was_read(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    directory.manifest["status"] = "running"  # so that nothing vouches for the log
    doubled(directory.events_path)
    assert recompute(directory)["events_sha256"] == file_sha256(directory.events_path)


@pytest.mark.parametrize("files", [{}, [], None, {"summary.json": None}])
def test_a_seal_vouches_for_what_it_knows_alone(files: Any, sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    directory.manifest["files"] = files
    assert directory.unverified is not None
    directory = copy_of(sealed, tmp_path / "other")
    del directory.manifest["files"]["summary.json"]
    assert directory.unverified == "its seal says nothing of summary.json"


@pytest.mark.parametrize(
    ("key", "value"), [("staleness", 0), ("seed", 7), ("steps", 9), ("system", "colocated")]
)
def test_what_a_manifest_asks_for_cannot_be_changed_alone(
    key: str, value: Any, sealed: Path, tmp_path: Path
) -> None:
    directory = copy_of(sealed, tmp_path)
    directory.manifest["spec"][key] = value
    with pytest.raises(InvalidRun, match=r"manifest.json was changed"):
        directory.check()


def test_a_manifest_and_a_summary_of_different_runs_are_refused(sealed: Path, tmp_path: Path) -> None:
    """Nothing vouches for either, and they say different things."""
    directory = copy_of(sealed, tmp_path)
    directory.manifest.pop("files")
    path = directory.path / "summary.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 5'))
    with pytest.raises(InvalidRun, match="its summary is of seed 5, its manifest asks for 0"):
        read_summary(directory)


def test_whoever_finds_a_run_does_not_vouch_for_it(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    doubled(directory.events_path)
    directory.seal("interrupted", {}, reason="its process ended before it was sealed")
    found = RunDirectory.open(tmp_path / "runs", directory.id)
    found.check()
    assert found.unverified == "it ended without a seal of its own"


def test_a_run_is_called_as_its_folder_is(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    directory.path.rename(tmp_path / "runs" / "mine")
    (found,) = open_runs(tmp_path / "runs")
    assert found.id == "mine"
    assert found.summary["seed"] == 0


def test_a_run_without_its_mark_is_not_complete(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    assert directory.status == "complete"
    (directory.path / "DONE").unlink()
    assert directory.status == DIED
    with pytest.raises(BenchError, match="no complete run"):
        open_runs(tmp_path / "runs")


def test_a_folder_without_a_manifest_is_told_of(sealed: Path, tmp_path: Path) -> None:
    directory = copy_of(sealed, tmp_path)
    root = tmp_path / "runs"
    assert unreadable(root) == []
    manifest = directory.path / "manifest.json"
    for content in (
        manifest.read_text()[:300],
        "{}",
        '{"spec": {}}',
        manifest.read_text().replace('"group"', '"x"'),
    ):
        manifest.write_text(content)
        assert list_runs(root) == []
        (line,) = unreadable(root)
        assert str(directory.path) in line
        with pytest.raises(UsageError, match="not a manifest"):
            RunDirectory.open(root, directory.id)


def test_an_interrupted_run_whose_log_was_changed_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(tally: Tally) -> None:
        if len(tally.steps) == 2:  # the first one is on the disk
            (path,) = tmp_path.glob("*/events.jsonl")
            with path.open("r+b") as file:
                file.seek(path.read_bytes().index(b'"tokens":') + 9)
                file.write(b"9")
            raise KeyboardInterrupt

    with pytest.raises(InvalidRun, match="is not what was written to it"):
        run(small_spec(steps=3), tmp_path, stepped=interrupt)
    (manifest,) = list_runs(tmp_path)
    assert manifest["status"] == "invalid"


def test_a_write_that_is_interrupted_leaves_a_broken_log(tmp_path: Path) -> None:
    class Interrupted(Short):
        def write(self, data: Any) -> int:
            self._inner.write(data[:10])
            raise KeyboardInterrupt

    log = EventLog(tmp_path / "events.jsonl", lambda event: None)
    log._file = Interrupted(log._file, lambda write: False)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        log.emit(VersionPublished(t_ns=0, version=1, stats=()))
    assert log.broken
    log.close()
    assert (tmp_path / "events.jsonl").stat().st_size == 10, "nothing stands behind the hole"


def test_a_traced_run_is_recomputed_as_it_was(tmp_path: Path) -> None:
    """Responses of a trace are as long as they were: no cap cut them off."""
    trace = tmp_path / "trace.csv"
    trace.write_text("output_tokens\n15000\n20000\n")
    spec = resolve(
        system="colocated", model="dense-9b", backend=None, steps=1, seed=3, staleness=0, gpus=8,
        settings=SMALL, trace=trace,
    )  # fmt: skip
    result = run(spec, tmp_path / "runs")
    assert result.summary["cut_off"]["responses_truncated"] is None
    assert recompute(result.directory) == result.summary


# ------------------------------------------------------------------------------- holes


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 4999), length=st.integers(1, 3000), fill=st.sampled_from([b"", b"\0", b"{}\n"]))
def test_a_log_with_a_hole_never_ends_in_a_traceback(
    cut: int, length: int, fill: bytes, sealed: Path
) -> None:
    """A summary comes out, or one line that names the file: whatever is cut out or overwritten."""
    data = next(sealed.glob("*/events.jsonl")).read_bytes()
    start, holed = cut * (len(data) // 5000), sealed / "holed.jsonl"
    holed.write_bytes(data[:start] + fill * (length if fill == b"\0" else 1) + data[start + length :])
    said = summary_or_error(holed)
    assert isinstance(said, dict) or (said.startswith(f"{holed}:") and "\n" not in said)


def summary_or_error(log: Path) -> dict[str, Any] | str:
    tally = Tally()
    try:
        with reading(log) as events:
            for event in events:
                tally.add(event)
            return tally.summary()
    except InvalidRun as error:
        return str(error)


def test_a_hole_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":0,"kind":"device.back","device":0}\n{"t":0,"ki\0\0\n{"t":0,"kind":"b"}\n')
    with pytest.raises(InvalidRun, match=r"events.jsonl:2: the log has a hole"), reading(path) as events:
        list(events)
    path.write_bytes(b'{"t":0,"kind":"device.back","device":0}\n[1]\n')
    with pytest.raises(InvalidRun, match=r"events.jsonl:2: .*not an event"), reading(path) as events:
        list(events)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":0,"kind":"device.back","device":0}\n{"t":0,"ki')
    with reading(path) as events:
        assert [event.kind for event in events] == ["device.back"]


# ------------------------------------------------------------------------------- who lives


def test_a_run_whose_process_is_gone_died(tmp_path: Path) -> None:
    spec = small_spec(steps=1)
    path = reserve(tmp_path, spec.name)
    log = EventLog(path / "events.jsonl", lambda event: None)
    directory = RunDirectory.begin(path, spec.manifest(), code_sha256())
    assert (directory.status, directory.is_alive()) == ("running", True)
    assert "it is running" in str(directory.unverified)
    log.close()
    assert (directory.status, directory.is_alive()) == (DIED, False)
    assert "it died" in str(directory.unverified)
    directory.seal("interrupted", {})
    assert directory.status == "interrupted"


def test_runs_of_one_second_do_not_share_a_directory(tmp_path: Path) -> None:
    spec = small_spec(steps=1)
    paths = [reserve(tmp_path, spec.name) for _ in range(12)]
    assert len(set(paths)) == 12


def test_a_log_is_hashed_as_it_is_written(tmp_path: Path) -> None:
    seen: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", seen.append)
    log.emit(DeviceBack(t_ns=0, device=1))
    log.emit(VersionPublished(t_ns=5, version=1, stats=({"loss": 0.5},)))
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == 2, "an RL step is on the disk at once"
    log.emit(RunEnded(t_ns=9, weights_sha256=None))
    log.close()
    log.close()
    content = (tmp_path / "events.jsonl").read_bytes()
    assert hashlib.sha256(content).hexdigest() == log.sha256
    assert [decode(orjson.loads(line)) for line in content.splitlines()] == seen
    with (tmp_path / "events.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more


# ------------------------------------------------------------------------------- what code ran


def test_the_digest_of_the_code_is_of_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1")
    two.write_text("b = 2")
    files = [("one.py", one), ("two.py", two)]
    digests = {files_sha256(files), files_sha256([("uno.py", one), ("two.py", two)])}
    two.write_text("b = 3")
    digests.add(files_sha256(files))
    one.write_text("a = 1b")
    two.write_text(" = 3")
    digests.add(files_sha256(files))
    assert len(digests) == 4


def test_what_decides_a_number_is_hashed() -> None:
    """Found by following imports, also those within functions and those of a worker process."""
    names = [name for name, _ in deciding_files()]
    assert names == sorted(set(names))
    for expected in (
        "systems/runtime.py", "systems/policies/pivot.py", "systems/backends/sim/replica.py",
        "systems/backends/live/worker.py", "systems/backends/live/roles.py", "systems/model/engine.py",
        "workloads/synthetic.py", "workloads/hops/models/dense/model.safetensors", "harness/runs/runner.py",
        "harness/runs/tiny_models.py", "harness/runs/live_costs.py", "harness/runs/estimates.py",
        "harness/results/summary.py", "systems/__init__.py",
    ):  # fmt: skip
        assert expected in names
    for other in ("harness/studies/compare.py", "harness/cli/run.py", "harness/fit/kernels.py"):
        assert other not in names, "it decides what is said of a run, not the run"
    assert code_sha256() == files_sha256(deciding_files())


def test_imports_are_followed_through_names_and_functions() -> None:
    found = reachable(["harness.cli.sweep"])
    assert "harness.cli.cell" in found
    assert "systems.backends.cosim.lengths" in found, "imported in a function of another module"
    assert "systems.types.Role" not in found
    assert all(path.suffix == ".py" for path in found.values())


def test_a_manifest_says_what_ran(sealed: Path, tmp_path: Path) -> None:
    manifest = copy_of(sealed, tmp_path).manifest
    assert manifest["code_sha256"] == code_sha256()
    assert (manifest["schema"], manifest["event_schema"]) == (2, 2)
    assert json.loads(json.dumps(manifest)) == manifest

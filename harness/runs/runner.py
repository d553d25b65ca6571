"""Runs a spec: assemble, record, drive the pipeline, seal.

However a run ends (of itself, by a signal, by a fault, by a full disk), it is sealed with what is known, and
what its caller is told is decided in one place (`ending_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import BenchError, InvalidRun, UnfitError
from harness.results.log import EVENTS, EventLog, reading
from harness.results.record import RUNS, RunDirectory, reserve
from harness.results.summary import Caps, Tally
from harness.results.wandb import Mirror
from harness.runs.assemble import Parts, assemble
from harness.runs.backends import BACKENDS
from harness.runs.code import code_sha256
from harness.runs.spec import RunSpec, cores
from systems.backends.base import ClusterUnfit
from systems.costs.fluid import steady
from systems.estimates.estimator import Estimator
from systems.estimates.truth import TrueLengths
from systems.events import EVENT_SCHEMA, EventSink, RunBegan, RunEnded, RunStopped
from systems.loop.clock import NothingScheduled, begin_time, now_ns, run_virtual
from systems.loop.watchdog import Stalled
from systems.machine.files import file_sha256
from systems.pipeline import Pipeline
from systems.plans import PolicyFault
from systems.policies import policy_of
from systems.policies.planners import PLANNERS
from systems.runtime import Runtime
from systems.staleness import Admission
from systems.types import Kind, NotFinite

SEAL_PATIENCE_S = 3.0  # a disk that is full for a moment may take the seal after all
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask a run to end


@dataclass(frozen=True)
class RunResult:
    """A finished run and its numbers."""

    directory: RunDirectory
    summary: dict[str, Any]


def run(
    spec: RunSpec, root: Path = RUNS, *, started: Callable[[RunDirectory], None] = lambda _: None,
    stepped: Callable[[Tally], None] = lambda _: None, mirror: Mirror | None = None,
) -> RunResult:  # fmt: skip
    """Run `spec` and record it under `root`. Errors in the request are raised before anything exists."""
    parts = assemble(spec)
    mirror = mirror or Mirror("disabled")
    measured = spec.on.measured  # then the mirror waits: it would need the cores that are measured

    def after_step(tally: Tally) -> None:
        with harmlessly():
            stepped(tally)
            if not measured:
                mirror.step(tally.steps[-1])

    tally = Tally(after_step, caps=caps_of(spec.to_json()))
    path = reserve(root, spec.name)
    log = EventLog(path / EVENTS, tally.add)
    directory = RunDirectory.begin(path, spec.manifest(), code_sha256())
    began = time.perf_counter()
    error: BaseException | None = None
    try:
        facts = header(spec, parts)
        log.emit(facts)
        with harmlessly():
            started(directory)
            if not measured:
                mirror.begin(directory.id, directory.path, facts)
        with rarely_collected():
            spec.on.clock(drive(spec, parts, log))
        weights = parts.learned.weights_sha256() if parts.learned else None
        log.emit(RunEnded(t_ns=tally_end(tally), weights_sha256=weights))
        if parts.learned:
            parts.learned.save(directory.path / "weights")
    except BaseException as raised:
        error = raised
    with undisturbed():
        ending, summary = seal(directory, log, tally, ending_of(directory.id, log.path, error), began)
    if measured and tally.steps:
        mirror.begin(directory.id, directory.path, tally.began)
        for step in tally.steps:
            mirror.step(step)
    mirrored = mirror.finish(summary)
    with contextlib.suppress(OSError):  # the run is sealed; a mirror fails without harm
        directory.note(wandb=mirrored)
    if ending.error is not None:
        raise ending.error
    if summary is None:
        raise InvalidRun(f"{directory.id}: ended well without a single RL step")
    return RunResult(directory, summary)


@dataclass(frozen=True)
class Ending:
    """How a run ended, in the words of its manifest, and what its caller is told."""

    status: str
    reason: str = ""
    error: BaseException | None = None


def ending_of(run: str, log: Path, error: BaseException | None) -> Ending:
    """`error` is what stopped the run, if anything did."""
    cause = first_cause(error) if error is not None else None
    match cause:
        case None:
            return Ending("complete")
        case KeyboardInterrupt() | asyncio.CancelledError():
            return Ending("interrupted", error=KeyboardInterrupt())
        case NothingScheduled():
            found = InvalidRun(f"{run}: {cause}; the last event in {log} says where")
            return Ending("invalid", str(cause), found)
        case Stalled() | PolicyFault():
            return Ending("invalid", str(cause), InvalidRun(f"{run}: {cause}"))
        case NotFinite():
            return Ending("invalid", str(cause), InvalidRun(f"{run}: {cause}; what was logged is in {log}"))
        case InvalidRun():
            return Ending("invalid", str(cause), cause)
        case ClusterUnfit():
            told = UnfitError(f"{run}: {cause}; what was logged is in {log}")
            return Ending("failed", f"{type(cause).__name__}: {cause}", told)
        case OSError():  # of the disk, or the system: no mistake in the request
            told = UnfitError(f"{run}: {cause.filename or log}: {cause.strerror or cause}")
            return Ending("failed", f"{type(cause).__name__}: {cause}", told)
        case BenchError():
            return Ending("failed", f"{type(cause).__name__}: {cause}", cause)
        case _:
            return Ending("failed", f"{type(cause).__name__}: {cause}", error)


def seal(
    directory: RunDirectory, log: EventLog, tally: Tally, ending: Ending, began: float
) -> tuple[Ending, dict[str, Any] | None]:
    """Write the summary and the seal. What fails here is how the run ended, and is sealed as that.

    A log that is not what was hashed makes the run invalid, however it ended. One that could not be written
    to its end is vouched for by nobody.
    """
    summary: dict[str, Any] | None = None
    files: dict[str, str] = {}
    try:
        log.close()
        if not log.broken:
            if file_sha256(log.path) != log.sha256:
                raise InvalidRun(f"{directory.id}: {log.path} is not what was written to it")
            files[EVENTS] = log.sha256
            if tally.steps:
                summary = identify(directory, log.sha256, tally.summary())
                files |= directory.write_summary(summary)
                if ending.error is None:
                    check(directory.id, summary)
    except Exception as error:
        if ending.error is None or isinstance(error, InvalidRun):
            ending = ending_of(directory.id, log.path, error)
    ended = {"reason": ending.reason} if ending.reason else {}
    wall_s = round(time.perf_counter() - began, 3)
    patience = time.monotonic() + SEAL_PATIENCE_S
    while True:
        try:
            directory.seal(ending.status, files, **ended, wall_s=wall_s, events_sha256=files.get(EVENTS))
            return ending, summary
        except OSError as error:
            if time.monotonic() > patience:  # it stays unsealed: whoever looks sees that it died
                return (ending if ending.error else ending_of(directory.id, log.path, error)), summary
        time.sleep(0.2)


@contextmanager
def harmlessly() -> Iterator[None]:
    """What shows a run to people must not end it: an error in there is nobody's result."""
    with contextlib.suppress(Exception):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end a run wait until its seal is written; whoever sent one is obeyed afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is disturbed by signals
        return
    came: list[int] = []
    usual = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in usual.items():
        if callable(handler):
            signal.signal(number, lambda received, _: came.append(received))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)


def caps_of(spec: Mapping[str, Any]) -> Caps:
    """Longest generations of a simulated run, from the request in its manifest. Real text says itself whether
    it was cut off; a trace's responses are as long as they were."""
    if BACKENDS[spec["backend"]].real:
        return Caps()
    lengths = spec["group"]["lengths"]
    return Caps(None if spec.get("trace") else lengths["response_cap"], lengths["judge_cap"])


async def drive(spec: RunSpec, parts: Parts, log: EventSink) -> None:
    """The one place where a pipeline meets a policy and a backend."""
    policy = policy_of(spec.policy, spec.planner)
    admission, estimator = Admission(parts.recipe), estimator_of(spec, parts)
    runtime = Runtime(
        parts.layout, parts.recipe, policy, parts.backend, log, admission, estimator, parts.deadlines
    )
    pipeline = Pipeline(parts.recipe, parts.workload, admission, estimator, runtime, log)
    try:
        await parts.backend.prepare()
        begin_time()
        await pipeline.run()
    finally:
        parts.backend.close()
        if not pipeline.finished:
            log.emit(RunStopped(t_ns=now_ns(), where=runtime.describe()))


def estimator_of(spec: RunSpec, parts: Parts) -> Estimator:
    """Who learns from the run; the reference planner is told the lengths of what is under way."""
    if spec.planner is not None and PLANNERS[spec.planner].knows_lengths:
        lengths_of = parts.workload.lengths_of  # type: ignore[attr-defined]  # of simulated workloads only
        return TrueLengths(parts.prior, parts.recipe, lengths_of)
    return Estimator(parts.prior, parts.recipe)


def simulate(spec: RunSpec, parts: Parts, log: EventSink) -> None:
    """Drive a spec in virtual time, its first event included; nothing but `log` hears of it."""
    log.emit(header(spec, parts))
    with rarely_collected():
        run_virtual(drive(spec, parts, log))


def first_cause(error: BaseException) -> BaseException:
    """The first error of a group of tasks that failed together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def rarely_collected() -> Iterator[None]:
    """A run keeps millions of live objects: searching them for garbage as often as usual costs a third, and
    every two hundred thousand allocations still an eighth."""
    usual = gc.get_threshold()
    gc.set_threshold(5_000_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def tally_end(tally: Tally) -> int:
    published_s: float = tally.steps[-1]["published_s"]
    return round(published_s * 1e9)


def header(spec: RunSpec, parts: Parts) -> RunBegan:
    """The first event: what every later one is read with. Nothing of this moment, and of this machine
    only what measured numbers depend on."""
    group = spec.group
    return RunBegan(
        t_ns=0,
        schema=EVENT_SCHEMA,
        kind_of_numbers=spec.kind,
        system=spec.system,
        model=group.name,
        policy=_model_name(spec, "policy"),
        judge=_model_name(spec, "judge"),
        seed=spec.seed,
        gpus=group.cluster.gpus,
        token_scale=parts.cost.token_scale,
        extrapolated=parts.cost.extrapolated,
        staleness_bound=spec.staleness,
        steps=spec.steps,
        samples_per_group=parts.recipe.samples,
        judge_calls=parts.recipe.judge_calls,
        publishing=parts.recipe.publishing,
        template={role: parts.layout.template[role] for role in parts.layout.template},
        floor=asdict(parts.floor),
        # What a measured number depends on: devices that share cores are not comparable with others.
        cores=cores() if spec.on.measured else None,
        oversubscribed=group.cluster.gpus > cores() if spec.on.measured else None,
        steady=steady_of(spec, parts),
        machine=str(spec.machine) if spec.machine else None,
    )


def steady_of(spec: RunSpec, parts: Parts) -> dict[str, float] | None:
    """What the steady fluid optimum of the run's priors is, for static and for divisible shares."""
    if spec.on.measured:
        return None
    found = steady(parts.cost, parts.layout, parts.recipe, parts.prior)
    if not math.isfinite(found.divisible_s):
        return None
    static = {"static_s": found.static_s} if math.isfinite(found.static_s) else {}
    return {**static, "divisible_s": found.divisible_s}


def _model_name(spec: RunSpec, which: str) -> str:
    """The modelled pair's name, and before it that of the real model that stands for it."""
    modelled: str = getattr(spec.group.pair, which)
    if spec.group.real is None:
        return modelled
    task, _, name = getattr(spec.group.real, which).split("/")
    return f"{task}-{name}" if spec.on.measured else f"{task}-{name} as {modelled}"


def identify(directory: RunDirectory, events_sha256: str, summary: dict[str, Any]) -> dict[str, Any]:
    """A summary with the run that it is of."""
    return {
        "run": directory.id,
        "path": str(directory.path),
        "kind": summary.pop("kind_of_numbers"),
        **summary,
        "events_sha256": events_sha256,
    }


def recompute(directory: RunDirectory) -> dict[str, Any]:
    """The summary again, from the events alone, with the digest of what was read."""
    directory.check()
    with reading(directory.events_path) as events:
        tally = Tally(caps=caps_of(directory.manifest["spec"]))
        for event in events:
            tally.add(event)
        if not tally.steps:
            raise BenchError(f"{directory.id}: no RL step was finished, there is nothing to summarise")
        summary = identify(directory, file_sha256(directory.events_path), tally.summary())
    check(directory.id, summary)
    return summary


def check(run_id: str, summary: dict[str, Any]) -> None:
    """A run that beats its lower bound, or loses device time, is not a measurement."""
    modelled = summary["kind"] != Kind.MEASURED  # a measured run may beat what a fit predicts
    if modelled and summary["makespan_s"] < summary["lower_bound_s"] * (1 - 1e-9):
        raise InvalidRun(
            f"{run_id}: makespan {summary['makespan_s']:.3f} s beats the lower bound "
            f"{summary['lower_bound_s']:.3f} s"
        )
    if min(summary["gpu_time_share"].values()) < -1e-9:
        raise InvalidRun(f"{run_id}: device time is counted twice: {summary['gpu_time_share']}")

"""Runs a spec: assemble, record, drive the pipeline, seal. Ctrl-C seals too."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.build import Parts, build
from harness.errors import BenchError, InvalidRun, UnfitError
from harness.record import RUNS, SCHEMA, EventLog, RunDirectory, read_events
from harness.sinks.wandb_ import Mirror
from harness.spec import RunSpec, cores
from harness.tally import Tally
from systems.backends.base import ClusterUnfit
from systems.clock import NothingScheduled, begin_time, now_ns, run_live, run_virtual
from systems.pipeline import Pipeline
from systems.policies import SYSTEMS
from systems.runtime import Runtime
from systems.types import EventSink, Kind


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
    parts = build(spec)
    mirror = mirror or Mirror("disabled")
    directory = RunDirectory.create(root, spec)
    started(directory)

    measured = spec.kind is Kind.MEASURED  # then the mirror waits: it would need the cores that are measured

    def after_step(tally: Tally) -> None:
        stepped(tally)
        if not measured:
            mirror.step(tally.steps[-1])

    tally = Tally(after_step)
    log = EventLog(directory.events_path, tally.add)
    began = time.perf_counter()
    status, reason = "failed", ""
    try:
        facts = header(spec, parts)
        log.emit("run.began", 0, **facts)
        if not measured:
            mirror.begin(directory.id, directory.path, facts)
        with rarely_collected():
            (run_live if spec.kind is Kind.MEASURED else run_virtual)(drive(spec, parts, log))
        weights = parts.learned.weights_sha256() if parts.learned else None
        log.emit("run.ended", tally_end(tally), weights_sha256=weights)
        if parts.learned:
            parts.learned.save(directory.path / "weights")
        check(directory.id, tally.summary())
        status = "complete"
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = "interrupted"
        raise KeyboardInterrupt from None
    except NothingScheduled as error:
        reason = str(error)
        raise InvalidRun(f"{directory.id}: {error}; the last event in {log.path} says where") from None
    except InvalidRun as error:
        status, reason = "invalid", str(error)
        raise
    except BaseException as error:
        cause = first_cause(error)
        reason = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, ClusterUnfit):
            raise UnfitError(f"{directory.id}: {cause}; what was logged is in {log.path}") from None
        raise
    finally:
        log.close()
        summary = identify(directory, log.sha256, tally.summary()) if tally.steps else None
        if summary:
            directory.write_summary(summary)
        directory.seal(
            status,
            **({"reason": reason} if reason else {}),
            wall_s=round(time.perf_counter() - began, 3),
            events_sha256=log.sha256,
        )
        if measured and tally.steps:
            mirror.begin(directory.id, directory.path, tally.began)
            for step in tally.steps:
                mirror.step(step)
        directory.note(wandb=mirror.finish(summary))
    assert summary is not None
    return RunResult(directory, summary)


async def drive(spec: RunSpec, parts: Parts, log: EventSink) -> None:
    """The one place where a pipeline meets a policy and a backend."""
    policy = SYSTEMS[spec.system]()
    runtime = Runtime(parts.layout, parts.recipe, policy, parts.backend, log, parts.prior)
    pipeline = Pipeline(parts.recipe, parts.workload, runtime, log)
    try:
        await parts.backend.prepare()
        begin_time()
        await pipeline.run()
    finally:
        parts.backend.close()
        if not runtime.progress.finished:
            log.emit("run.stopped", now_ns(), where=runtime.describe())


def first_cause(error: BaseException) -> BaseException:
    """The first error of a group of tasks that failed together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def rarely_collected() -> Iterator[None]:
    """A run keeps millions of live objects: searching them for garbage as often as usual costs a third."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def tally_end(tally: Tally) -> int:
    published_s: float = tally.steps[-1]["published_s"]
    return round(published_s * 1e9)


def header(spec: RunSpec, parts: Parts) -> dict[str, Any]:
    """The first event: what every later one is read with. Nothing of this moment, and of this machine
    only what measured numbers depend on."""
    group = spec.group
    return {
        "schema": SCHEMA,
        "kind_of_numbers": spec.kind,
        "system": spec.system,
        "model": group.name,
        "policy": _model_name(spec, "policy"),
        "judge": _model_name(spec, "judge"),
        "seed": spec.seed,
        "gpus": group.cluster.gpus,
        "token_scale": parts.cost.token_scale,
        "extrapolated": parts.cost.extrapolated,
        "staleness_bound": spec.staleness,
        "steps": spec.steps,
        "samples_per_group": parts.recipe.samples,
        "judge_calls": parts.recipe.judge_calls,
        "publishing": parts.recipe.publishing,
        "template": {role: parts.layout.template[role] for role in parts.layout.template},
        "floor": asdict(parts.floor),
        **(this_machine(spec) if spec.kind is Kind.MEASURED else {}),
    }


def this_machine(spec: RunSpec) -> dict[str, Any]:
    """What a measured number depends on: devices that share cores are not comparable with others."""
    return {"cores": cores(), "oversubscribed": spec.group.cluster.gpus > cores()}


def _model_name(spec: RunSpec, which: str) -> str:
    """The modelled pair's name, and before it that of the real model that stands for it."""
    modelled: str = getattr(spec.group.pair, which)
    if spec.group.real is None:
        return modelled
    task, _, name = getattr(spec.group.real, which).split("/")
    return f"{task}-{name}" if spec.kind is Kind.MEASURED else f"{task}-{name} as {modelled}"


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
    """The summary again, from the events alone."""
    tally = Tally()
    log_sha = directory.manifest.get("events_sha256", "")
    for event in read_events(directory.events_path):
        tally.add(event)
    if not tally.steps:
        raise BenchError(f"{directory.id}: no RL step was finished, there is nothing to summarise")
    check(directory.id, tally.summary())
    return identify(directory, log_sha, tally.summary())


def check(run_id: str, summary: dict[str, Any]) -> None:
    """A run that beats its lower bound, or loses device time, is not a measurement."""
    modelled = summary["kind_of_numbers"] != Kind.MEASURED  # a measured run may beat what a fit predicts
    if modelled and summary["makespan_s"] < summary["lower_bound_s"] * (1 - 1e-9):
        raise InvalidRun(
            f"{run_id}: makespan {summary['makespan_s']:.3f} s beats the lower bound "
            f"{summary['lower_bound_s']:.3f} s"
        )
    if min(summary["gpu_time_share"].values()) < -1e-9:
        raise InvalidRun(f"{run_id}: device time is counted twice: {summary['gpu_time_share']}")

"""Shared by all suites: small runs in virtual time, recorded in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.results.log import Told
from harness.results.summary import Tally
from harness.runs.assemble import Parts, assemble
from harness.runs.runner import estimator_of, header
from harness.runs.spec import RunSpec, resolve
from systems.backends.base import Backend
from systems.events import Event, encode
from systems.loop.clock import run_virtual
from systems.pipeline import Pipeline
from systems.policies import policy_of
from systems.runtime import Runtime
from systems.staleness import Admission

# Small enough that hundreds of runs take seconds. Lengths are the usual ones: the simulator's effort does
# not depend on them, and shorter ones would make every shift dearer than the step that it is for.
SMALL = (
    "workload.prompts=8",
    "workload.samples=8",
    "workload.mini_batches=2",
    "workload.micro_batch_samples=16",
    "lengths.response_sigma=0.4",  # so that forecasts of a small batch are sure enough to act upon
    "lengths.judge_sigma=0.3",
)


SLOW_LIMIT_S = 1800  # a slow test that takes longer hangs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


class MemoryLog(Told):
    """An event sink that keeps what happened, and the events as a file would have them."""

    def __init__(self) -> None:
        self.happened: list[Event] = []
        super().__init__(self.happened.append)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [encode(event) for event in self.happened]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [encode(event) for event in self.happened if event.kind == kind]

    def tally(self) -> Tally:
        tally = Tally()
        for event in self.happened:
            tally.add(event)
        return tally


def small_spec(
    system: str = "pivot", model: str = "dense-9b", steps: int = 3, seed: int = 0,
    staleness: int | None = None, gpus: int | None = 8, settings: tuple[str, ...] = SMALL,
    backend: str | None = None,
) -> RunSpec:  # fmt: skip
    return resolve(
        system=system, model=model, backend=backend, steps=steps, seed=seed, staleness=staleness, gpus=gpus,
        settings=settings,
    )  # fmt: skip


def simulate(spec: RunSpec, wrap: Any = lambda backend: backend) -> tuple[MemoryLog, Tally, Runtime]:
    """Run a spec on its backend, wrapped, and tally its events."""
    parts: Parts = assemble(spec)
    backend: Backend = wrap(parts.backend)
    log, kept = MemoryLog(), []

    async def drive() -> None:
        policy, admission, estimator = (
            policy_of(spec.policy, spec.planner),
            Admission(parts.recipe),
            estimator_of(spec, parts),
        )
        runtime = Runtime(parts.layout, parts.recipe, policy, backend, log, admission, estimator)
        kept.append(runtime)
        try:
            await Pipeline(parts.recipe, parts.workload, admission, estimator, runtime, log).run()
        finally:
            backend.close()

    log.emit(header(spec, parts))
    run_virtual(drive())
    return log, log.tally(), kept[0]


@pytest.fixture
def virtual() -> Any:
    """Runs a coroutine function in virtual time."""

    def run(main: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(1e6):
                return await main()

        return run_virtual(bounded())

    return run

"""The runtime under a policy that a test dictates: shifts, drains, losses and what is learned from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.runs.assemble import Parts, assemble
from harness.runs.runner import first_cause
from systems.backends.base import TrainingWorker, WorkerLost
from systems.estimates.estimator import SMOOTHING, Estimator
from systems.loop.clock import now_ns, run_virtual
from systems.loop.watchdog import Stalled
from systems.pipeline import Pipeline
from systems.policies import SYSTEMS
from systems.runtime import Runtime
from systems.serving import Deadlines
from systems.staleness import Admission
from systems.types import (
    Group,
    Layout,
    Lease,
    LeaseState,
    Placement,
    Plan,
    Prompt,
    Role,
    Sample,
    Sequence,
    View,
)
from tests.conftest import MemoryLog, small_spec

TRAIN, ROLLOUT, REWARD = Role.TRAIN, Role.ROLLOUT, Role.REWARD


def place(*placements: tuple[Role, tuple[int, ...]]) -> tuple[Placement, ...]:
    return tuple(sorted(Placement(role, devices) for role, devices in placements))


@dataclass
class Dictated:
    """Wants what the test wants at the moment."""

    wanted: tuple[Placement, ...]
    views: list[View]
    then: Callable[[], None] = lambda: None
    name = "dictated"
    default_staleness = 0
    time_shares = True

    def begin(self, layout: Layout) -> Placement:
        return Placement(TRAIN, ())  # any frozen value

    def plan(self, view: View, memory: Placement) -> tuple[Plan, Placement]:
        self.views.append(view)
        self.then()
        return Plan(self.wanted, why="dictated"), memory


class Stage:
    """A runtime on a simulated cluster of eight devices."""

    def __init__(self, parts: Parts, wanted: tuple[Placement, ...], deadlines: Deadlines) -> None:
        self.log, self.policy = MemoryLog(), Dictated(wanted, [])
        self.parts = parts
        self.runtime = Runtime(
            parts.layout,
            parts.recipe,
            self.policy,
            parts.backend,
            self.log,
            Admission(parts.recipe),
            Estimator(parts.prior, parts.recipe),
            deadlines,
        )

    def want(self, *placements: tuple[Role, tuple[int, ...]]) -> None:
        self.policy.wanted = place(*placements)
        self.runtime.turn.now()

    def submit(self, count: int, role: Role = ROLLOUT) -> list[Sequence]:
        made = []
        for number in range(count):
            sample = Sample(number, Group(number // 8, self.parts.workload.prompt(number // 8), 0))
            made.append(Sequence(number * 2, sample, role, Prompt(100), key=number, min_version=-1))
            sample.response = made[-1]
        self.runtime.serving.submit(made)
        return made

    def moment(self, kind: str, **fields: Any) -> float:
        """When the first such event happened, in seconds."""
        found = [e for e in self.log.of(kind) if all(e[key] == value for key, value in fields.items())]
        return float(found[0]["t"]) / 1e9

    def ended_well(self, sources: list[Any]) -> list[bool]:
        """Of each shift from these sources that has ended."""
        shifts = [e["shift"] for e in self.log.of("shift.began") if e["sources"] == sources]
        return [e["ok"] for e in self.log.of("shift.ended") if e["shift"] in shifts]

    def active(self) -> list[tuple[str, list[int]]]:
        """Role and devices of every lease that became active."""
        return [(e["role"], e["devices"]) for e in self.log.of("lease") if e["state"] == "active"]

    def states(self, epoch: int) -> list[str]:
        return [event["state"] for event in self.log.of("lease") if event["lease"] == epoch]


def play(
    main: Callable[[Stage], Coroutine[Any, Any, None]], *wanted: tuple[Role, tuple[int, ...]],
    deadlines: Deadlines | None = None,
) -> Stage:  # fmt: skip
    stages: list[Stage] = []

    async def bounded() -> None:
        stage = Stage(assemble(small_spec()), place(*wanted), deadlines or Deadlines())
        stages.append(stage)
        async with asyncio.timeout(1e6), stage.runtime:
            await asyncio.sleep(30)  # first placements
            await main(stage)

    run_virtual(bounded())
    return stages[0]


def test_a_training_unit_is_not_taken_away_while_it_trains() -> None:
    async def main(stage: Stage) -> None:
        runtime = stage.runtime
        async with runtime.training_unit() as (_, lease):
            began = now_ns() / 1e9
            stage.want((ROLLOUT, (0,)), (REWARD, (4,)))
            await asyncio.sleep(50)
            assert lease.state is LeaseState.DRAINING
            assert stage.moment("shift.began", sources=[["train", [0, 1]]]) < began + 1
        await asyncio.sleep(30)
        shift = stage.log.of("shift.began")[-1]["shift"]
        assert stage.moment("shift.phase", shift=shift, phase="drain") == pytest.approx(began + 50)
        assert stage.states(lease.epoch) == ["loading", "active", "draining", "released"]
        assert ("rollout", "active") in {(e["role"], e["state"]) for e in stage.log.of("lease")}

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


def test_nobody_trains_on_a_unit_that_is_leaving() -> None:
    async def main(stage: Stage) -> None:
        stage.want((TRAIN, (2, 3)), (REWARD, (4,)))
        await asyncio.sleep(0.5)  # the shift is under way
        async with stage.runtime.training_unit() as (_, lease):
            assert lease.placement.devices == (2, 3)

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


def test_between_two_training_steps_the_policy_may_resize_the_unit() -> None:
    """The next step waits for the policy, and for the shift that it asks for, even if a batch is ready."""

    async def main(stage: Stage) -> None:
        async with stage.runtime.training_unit() as (_, lease):
            assert lease.placement.devices == (0, 1)
        asked = len(stage.policy.views)
        stage.policy.wanted = place((TRAIN, (0, 1, 2, 3)), (REWARD, (4,)))  # nobody wakes it for that
        async with stage.runtime.training_unit() as (_, lease):
            assert lease.placement.devices == (0, 1, 2, 3)
            assert stage.policy.views[asked].training.started_ns is None

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


def test_a_unit_whose_shift_failed_before_it_drained_can_be_trained_on() -> None:
    async def main(stage: Stage) -> None:
        runtime = stage.runtime
        stage.policy.then = lambda: runtime._leases.down.setdefault(7, None)  # after the plan is made
        stage.want((TRAIN, (0, 1)), (REWARD, (4,)), (ROLLOUT, (7,)))
        await asyncio.sleep(10)
        async with asyncio.timeout(60), runtime.training_unit() as (_, lease):
            assert lease.placement.devices == (0, 1)

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


@dataclass
class NeverSettles:
    """Asks to be woken every second, for nothing."""

    shifts: bool
    name = "never-settles"
    default_staleness = 0
    time_shares = True

    def begin(self, layout: Layout) -> Placement:
        return Placement(TRAIN, ())

    def plan(self, view: View, memory: Placement) -> tuple[Plan, Placement]:
        role = REWARD if self.shifts and view.now_ns // 60_000_000_000 % 2 else ROLLOUT
        nobody = place((role, (0,))) if self.shifts else ()
        return Plan(nobody, why="still thinking", revisit_ns=view.now_ns + 1_000_000_000), memory


@pytest.mark.parametrize("shifts", [False, True])
def test_a_run_in_which_nothing_gets_done_is_ended_even_if_the_policy_goes_on(shifts: bool) -> None:
    parts, log = assemble(small_spec()), MemoryLog()
    deadlines = Deadlines(sequence_s=600.0)

    async def drive() -> None:
        admission, estimator = Admission(parts.recipe), Estimator(parts.prior, parts.recipe)
        runtime = Runtime(
            parts.layout, parts.recipe, NeverSettles(shifts), parts.backend, log, admission, estimator,
            deadlines,
        )  # fmt: skip
        async with asyncio.timeout(1e7):
            await Pipeline(parts.recipe, parts.workload, admission, estimator, runtime, log).run()

    with pytest.raises(ExceptionGroup) as ended:
        run_virtual(drive())
    cause = first_cause(ended.value)
    assert isinstance(cause, Stalled)
    assert "nothing has got done for 2100 s" in str(cause)
    assert "batch ready" in str(cause) or "batch not ready" in str(cause)


def test_what_a_shift_costs_is_learned_without_its_drain() -> None:
    async def main(stage: Stage) -> None:
        prior = stage.parts.prior.shift_s
        assert stage.runtime.estimator.now.shift_s == prior, "first placements are not shifts"
        async with stage.runtime.training_unit():
            stage.want((ROLLOUT, (0,)), (REWARD, (4,)))
            await asyncio.sleep(500)
        await asyncio.sleep(30)
        shift = stage.log.of("shift.began")[-1]["shift"]
        took = stage.moment("shift.ended", shift=shift) - stage.moment(
            "shift.phase", shift=shift, phase="drain"
        )
        assert 0 < took < 30
        assert stage.runtime.estimator.now.shift_s == pytest.approx(prior + SMOOTHING * (took - prior))

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


def test_a_shift_whose_source_was_lost_before_it_began_fails() -> None:
    """Its device is not among the targets: the unit moves elsewhere."""

    async def main(stage: Stage) -> None:
        loop, runtime = asyncio.get_running_loop(), stage.runtime
        unit = next(lease for lease in runtime._leases.live.values() if lease.role is TRAIN)
        lost = WorkerLost((0, 1), "lost at this very moment")

        def lose_before_the_shift_begins() -> None:
            stage.policy.then = lambda: None
            loop.call_soon(runtime._lose_trainer, unit, lost)

        stage.policy.then = lose_before_the_shift_begins
        stage.want((TRAIN, (2, 3)), (REWARD, (4,)))
        await asyncio.sleep(1)
        assert stage.ended_well([["train", [0, 1]]]) == [False]
        await asyncio.sleep(200)
        assert ("train", [2, 3]) in stage.active()

    play(main, (TRAIN, (0, 1)), (REWARD, (4,)))


def test_what_did_not_drain_for_a_shift_that_failed_goes_on() -> None:
    """The unit is lost as it is to move to where a replica is: that replica has not been told yet."""

    async def main(stage: Stage) -> None:
        loop, runtime = asyncio.get_running_loop(), stage.runtime
        unit = next(lease for lease in runtime._leases.live.values() if lease.role is TRAIN)
        replica = next(lease for lease in runtime._leases.live.values() if lease.placement.devices == (2,))
        states: list[LeaseState] = []

        def lose_before_the_shift_begins() -> None:
            stage.policy.then = lambda: states.append(replica.state)
            loop.call_soon(runtime._lose_trainer, unit, WorkerLost((0, 1), "lost at this very moment"))

        stage.policy.then = lose_before_the_shift_begins
        stage.want((TRAIN, (2, 3)), (REWARD, (4,)))
        await asyncio.sleep(300)
        assert states[0] is LeaseState.ACTIVE, "nobody gave it up for the shift that failed"
        assert stage.ended_well([["rollout", [2]], ["train", [0, 1]]]) == [False]
        assert ("train", [2, 3]) in stage.active()
        assert stage.states(replica.epoch) == ["loading", "active", "draining", "released"]

    play(main, (TRAIN, (0, 1)), (ROLLOUT, (2,)), (REWARD, (4,)))


def test_a_shift_that_takes_too_long_fails_and_its_devices_restart() -> None:
    async def main(stage: Stage) -> None:
        stage.parts.backend.slow(0, 1e4)  # type: ignore[attr-defined]
        stage.want((ROLLOUT, (0,)), (REWARD, (4,)))
        await asyncio.sleep(400)
        assert not stage.log.of("shift.ended")[-1]["ok"]
        assert {e["device"] for e in stage.log.of("device.lost")} >= {0}
        assert "did not end in time" in stage.log.of("device.lost")[0]["why"]

    play(main, (REWARD, (4,)))


def test_a_device_comes_back_after_its_restart() -> None:
    async def main(stage: Stage) -> None:
        stage.parts.backend.lose(0)
        await asyncio.sleep(0.5)
        assert stage.runtime.view().down == (0,)
        assert [r.placement.devices for r in stage.runtime.view().of(ROLLOUT)] == []
        await asyncio.sleep(200)
        assert stage.runtime.view().down == ()
        assert [r.placement.devices for r in stage.runtime.view().of(ROLLOUT)] == [(0,)]
        assert len(stage.log.of("device.back")) == 1

    play(main, (ROLLOUT, (0,)), (REWARD, (4,)))


def test_sequences_survive_a_shift_of_their_replica() -> None:
    async def main(stage: Stage) -> None:
        sequences = stage.submit(16)
        await asyncio.sleep(5)
        stage.want((ROLLOUT, (1,)), (REWARD, (0,)), (REWARD, (4,)))
        await asyncio.sleep(2000)
        assert {sequence.phase.value for sequence in sequences} == {"done"}
        finished = [event["sequence"] for event in stage.log.of("sequence.finished")]
        assert sorted(finished) == [sequence.id for sequence in sequences]

    play(main, (ROLLOUT, (0,)), (REWARD, (4,)))


def test_the_policy_is_woken_at_the_time_that_it_asked_for() -> None:
    async def main(stage: Stage) -> None:
        seen = len(stage.policy.views)
        usual = stage.policy.plan

        def later(view: View, memory: Placement) -> tuple[Plan, Placement]:
            plan, kept = usual(view, memory)
            return replace(plan, revisit_ns=view.now_ns + 7_000_000_000), kept

        stage.policy.plan = later  # type: ignore[method-assign]
        stage.runtime.turn.now()
        began = now_ns()
        await asyncio.sleep(22)
        moments = [(view.now_ns - began) / 1e9 for view in stage.policy.views[seen:]]
        assert moments == pytest.approx([0, 7, 14, 21])

    play(main, (REWARD, (4,)))


# ------------------------------------------------------------------------------- a unit that hangs


class Hanging:
    """A training worker whose first request is never answered."""

    def __init__(self, inner: TrainingWorker, hangs: bool) -> None:
        self._inner, self._hangs = inner, hangs

    async def begin(self, batch: Any) -> None:
        if self._hangs:
            await asyncio.sleep(1e9)
        await self._inner.begin(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_training_unit_that_does_not_answer_is_lost_with_all_of_its_devices() -> None:
    spec = small_spec("disaggregated", steps=1)
    parts, log = assemble(spec), MemoryLog()
    usual, made = parts.backend.training, []

    def training(lease: Lease) -> Any:
        made.append(lease)
        return Hanging(usual(lease), hangs=len(made) == 1)

    parts.backend.training = training  # type: ignore[method-assign]

    async def drive() -> None:
        policy, admission, estimator = (
            SYSTEMS[spec.system](),
            Admission(parts.recipe),
            Estimator(parts.prior, parts.recipe),
        )
        runtime = Runtime(
            parts.layout, parts.recipe, policy, parts.backend, log, admission, estimator,
            Deadlines(train_s=1000.0),
        )  # fmt: skip
        async with asyncio.timeout(1e6):
            await Pipeline(parts.recipe, parts.workload, admission, estimator, runtime, log).run()

    run_virtual(drive())
    unit = list(made[0].placement.devices)
    assert [event["device"] for event in log.of("device.lost")] == unit
    assert all("does not answer" in event["why"] for event in log.of("device.lost"))
    assert log.of("train.lost")[0]["t"] - log.of("train.began")[0]["t"] == 1000e9
    assert [event["version"] for event in log.of("version.published")] == [1]
    assert len(made) == 2

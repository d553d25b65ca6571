import itertools

import pytest

from systems import lifecycle
from systems.lifecycle import IllegalTransition
from systems.types import (
    End,
    Group,
    Lease,
    LeaseState,
    Placement,
    Prompt,
    Role,
    Sample,
    SamplePhase,
    Segment,
    Sequence,
    SequencePhase,
)


def lease(role: Role = Role.ROLLOUT, devices: tuple[int, ...] = (0,), version: int = 0) -> Lease:
    made = Lease(Placement(role, devices), epoch=0, version=version)
    lifecycle.move_lease(made, LeaseState.ACTIVE)
    return made


def sequence(min_version: int = 0) -> Sequence:
    sample = Sample(0, Group(0, Prompt(3), 0))
    return Sequence(0, sample, Role.ROLLOUT, Prompt(3), key=0, min_version=min_version)


# Every legal edge, written out: the tables under test are not asked what is right.
LEASE_EDGES = {
    ("loading", "active"), ("active", "draining"), ("draining", "released"),
    ("loading", "lost"), ("active", "lost"), ("draining", "lost"),
}  # fmt: skip
SAMPLE_EDGES = {
    ("rolling", "judging"), ("judging", "scored"), ("scored", "batched"), ("batched", "trained"),
    ("rolling", "dropped"), ("judging", "dropped"), ("scored", "dropped"),
}  # fmt: skip
SEQUENCE_EDGES = {("waiting", "running"), ("waiting", "dropped"), ("running", "waiting"), ("running", "done")}


@pytest.mark.parametrize(("now", "to"), list(itertools.product(LeaseState, LeaseState)))
def test_lease_edges(now: LeaseState, to: LeaseState) -> None:
    made = Lease(Placement(Role.ROLLOUT, (0,)), epoch=0, state=now)
    if (now.value, to.value) in LEASE_EDGES:
        lifecycle.move_lease(made, to)
        assert made.state is to
    else:
        with pytest.raises(IllegalTransition, match=f"lease 0: {now} -> {to}"):
            lifecycle.move_lease(made, to)
        assert made.state is now


@pytest.mark.parametrize(("now", "to"), list(itertools.product(SamplePhase, SamplePhase)))
def test_sample_edges(now: SamplePhase, to: SamplePhase) -> None:
    sample = Sample(0, Group(0, Prompt(1), 0), phase=now)
    if (now.value, to.value) in SAMPLE_EDGES:
        lifecycle.move_sample(sample, to)
        assert sample.phase is to
    else:
        with pytest.raises(IllegalTransition, match=f"sample 0: {now} -> {to}"):
            lifecycle.move_sample(sample, to)
        assert sample.phase is now


@pytest.mark.parametrize(("now", "to"), list(itertools.product(SequencePhase, SequencePhase)))
def test_sequence_edges(now: SequencePhase, to: SequencePhase) -> None:
    """Those of `leave`, and `dispatch` for the way in."""
    one, on = sequence(), lease()
    one.phase, one.lease_epoch, on.running[0] = now, on.epoch, one
    if (now.value, to.value) in SEQUENCE_EDGES:
        lifecycle.leave(one, on, to)
        assert (one.phase, one.lease_epoch, on.running) == (to, -1, {})
    else:
        with pytest.raises(IllegalTransition, match=f"sequence 0: {now} -> {to}"):
            lifecycle.leave(one, on, to)


def test_a_sequence_ends_exactly_once() -> None:
    one, on = sequence(), lease()
    lifecycle.dispatch(one, on, 0)
    lifecycle.leave(one, on, SequencePhase.DONE)
    for again in (
        lambda: lifecycle.leave(one, on, SequencePhase.DONE),
        lambda: lifecycle.dispatch(one, on, 0),
    ):
        with pytest.raises(IllegalTransition):
            again()
    with pytest.raises(IllegalTransition):
        lifecycle.extend(one, 0, 1)


def test_segments_follow_versions() -> None:
    one, on = sequence(), lease()
    lifecycle.dispatch(one, on, 0)
    lifecycle.extend(one, 0, 2, (5, 6), (-0.1, -0.2))
    lifecycle.extend(one, 0, 1, (7,), (-0.3,))
    lifecycle.extend(one, 1, 2, (8, 9), (-0.4, -0.5))
    lifecycle.extend(one, 1, 0)
    assert one.segments == [Segment(0, 0, 3), Segment(1, 3, 5)]
    assert one.tokens == [5, 6, 7, 8, 9]
    lifecycle.extend(one, 1, 1, (4,), (-0.6,))
    lifecycle.extend(one, 2, -1)
    assert one.segments == [Segment(0, 0, 3), Segment(1, 3, 6)]
    assert (one.length, len(one.logprobs)) == (6, 6)


def test_dispatch_wants_an_active_replica_of_the_role_and_version() -> None:
    for bad in (lease(Role.REWARD), lease(version=1), Lease(Placement(Role.ROLLOUT, (0,)), 0, version=2)):
        with pytest.raises(IllegalTransition):
            lifecycle.dispatch(sequence(min_version=2), bad, 0)


def test_a_lease_with_sequences_is_not_released() -> None:
    on = lease()
    lifecycle.dispatch(sequence(), on, 0)
    lifecycle.move_lease(on, LeaseState.DRAINING)
    with pytest.raises(IllegalTransition, match="1 sequences"):
        lifecycle.move_lease(on, LeaseState.RELEASED)


def test_a_replica_that_drains_still_owns_its_devices() -> None:
    draining = lease(devices=(0, 1))
    lifecycle.move_lease(draining, LeaseState.DRAINING)
    with pytest.raises(IllegalTransition, match="device 1"):
        lifecycle.check_owners([draining, lease(devices=(1,))])
    lifecycle.move_lease(draining, LeaseState.RELEASED)
    lifecycle.check_owners([draining, lease(devices=(1,))])
    gone = lease(devices=(0, 1))
    lifecycle.move_lease(gone, LeaseState.LOST)
    lifecycle.check_owners([gone, lease(devices=(1,))])
    loading = Lease(Placement(Role.ROLLOUT, (1,)), epoch=7)
    with pytest.raises(IllegalTransition, match="device 1 is owned by leases 7 and 0"):
        lifecycle.check_owners([loading, lease(devices=(1,))])


def test_only_the_lease_that_has_a_sequence_may_give_it_up() -> None:
    one, on, other = sequence(), lease(), lease()
    other.epoch = 5
    lifecycle.dispatch(one, on, 0)
    with pytest.raises(IllegalTransition, match="sequence 0 is not on lease 5"):
        lifecycle.leave(one, other, SequencePhase.DONE)
    on.running.clear()
    with pytest.raises(IllegalTransition, match="sequence 0 is not on lease 0"):
        lifecycle.leave(one, on, SequencePhase.DONE)


def test_a_sequence_keeps_why_it_ended() -> None:
    one, on = sequence(), lease()
    lifecycle.dispatch(one, on, 0)
    lifecycle.leave(one, on, SequencePhase.DONE, End.LENGTH)
    assert one.end is End.LENGTH


def test_a_device_has_one_owner() -> None:
    with pytest.raises(IllegalTransition, match="device 1"):
        lifecycle.check_owners([lease(devices=(0, 1)), lease(devices=(1, 2))])
    with pytest.raises(IllegalTransition, match="device 1"):
        lifecycle.check_plan([Placement(Role.TRAIN, (0, 1)), Placement(Role.REWARD, (1,))])

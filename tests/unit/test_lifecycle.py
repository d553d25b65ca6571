import itertools

import pytest

from systems import lifecycle
from systems.lifecycle import IllegalTransition
from systems.types import (
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


@pytest.mark.parametrize(("now", "to"), list(itertools.product(LeaseState, LeaseState)))
def test_lease_edges(now: LeaseState, to: LeaseState) -> None:
    made = Lease(Placement(Role.ROLLOUT, (0,)), epoch=0, state=now)
    if to in lifecycle.LEASE[now]:
        lifecycle.move_lease(made, to)
        assert made.state is to
    else:
        with pytest.raises(IllegalTransition):
            lifecycle.move_lease(made, to)


@pytest.mark.parametrize(("now", "to"), list(itertools.product(SamplePhase, SamplePhase)))
def test_sample_edges(now: SamplePhase, to: SamplePhase) -> None:
    sample = Sample(0, Group(0, Prompt(1), 0), phase=now)
    if to in lifecycle.SAMPLE[now]:
        lifecycle.move_sample(sample, to)
    else:
        with pytest.raises(IllegalTransition):
            lifecycle.move_sample(sample, to)


def test_a_sequence_ends_exactly_once() -> None:
    one, on = sequence(), lease()
    lifecycle.dispatch(one, on)
    lifecycle.leave(one, on, SequencePhase.DONE)
    for again in (lambda: lifecycle.leave(one, on, SequencePhase.DONE), lambda: lifecycle.dispatch(one, on)):
        with pytest.raises(IllegalTransition):
            again()
    with pytest.raises(IllegalTransition):
        lifecycle.extend(one, 0, 1)


def test_segments_follow_versions() -> None:
    one, on = sequence(), lease()
    lifecycle.dispatch(one, on)
    lifecycle.extend(one, 0, 2, (5, 6), (-0.1, -0.2))
    lifecycle.extend(one, 0, 1, (7,), (-0.3,))
    lifecycle.extend(one, 1, 2, (8, 9), (-0.4, -0.5))
    lifecycle.extend(one, 1, 0)
    assert one.segments == [Segment(0, 0, 3), Segment(1, 3, 5)]
    assert one.tokens == [5, 6, 7, 8, 9]


def test_dispatch_wants_an_active_replica_of_the_role_and_version() -> None:
    for bad in (lease(Role.REWARD), lease(version=1), Lease(Placement(Role.ROLLOUT, (0,)), 0, version=2)):
        with pytest.raises(IllegalTransition):
            lifecycle.dispatch(sequence(min_version=2), bad)


def test_a_lease_with_sequences_is_not_released() -> None:
    on = lease()
    lifecycle.dispatch(sequence(), on)
    lifecycle.move_lease(on, LeaseState.DRAINING)
    with pytest.raises(IllegalTransition, match="1 sequences"):
        lifecycle.move_lease(on, LeaseState.RELEASED)


def test_a_device_has_one_owner() -> None:
    with pytest.raises(IllegalTransition, match="device 1"):
        lifecycle.check_owners([lease(devices=(0, 1)), lease(devices=(1, 2))])
    with pytest.raises(IllegalTransition, match="device 1"):
        lifecycle.check_plan([Placement(Role.TRAIN, (0, 1)), Placement(Role.REWARD, (1,))])

"""The legal transitions of leases, sequences and samples. An illegal one raises, always.

    lease     LOADING -> ACTIVE -> DRAINING -> RELEASED; any live state -> LOST
    sequence  WAITING -> RUNNING -> DONE; RUNNING -> WAITING on migration, interruption or loss
    sample    ROLLING -> JUDGING -> SCORED -> BATCHED -> TRAINED; any unfinished phase -> DROPPED

Every sequence ends exactly once and every device has one owner: both are checked here. The mutable types
(`Group`, `Sample`, `Sequence`, `Lease`) are changed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from systems.types import (
    End,
    Group,
    Lease,
    LeaseState,
    Placement,
    Sample,
    SamplePhase,
    Segment,
    Sequence,
    SequencePhase,
)


class IllegalTransition(RuntimeError):
    """A state machine was asked for an edge that it does not have: a bug, never a user's error."""


LEASE: Mapping[LeaseState, tuple[LeaseState, ...]] = {
    LeaseState.LOADING: (LeaseState.ACTIVE, LeaseState.LOST),
    LeaseState.ACTIVE: (LeaseState.DRAINING, LeaseState.LOST),
    LeaseState.DRAINING: (LeaseState.RELEASED, LeaseState.LOST),
    LeaseState.RELEASED: (),
    LeaseState.LOST: (),
}
SEQUENCE: Mapping[SequencePhase, tuple[SequencePhase, ...]] = {
    SequencePhase.WAITING: (SequencePhase.RUNNING, SequencePhase.DROPPED),
    SequencePhase.RUNNING: (SequencePhase.WAITING, SequencePhase.DONE),
    SequencePhase.DONE: (),
    SequencePhase.DROPPED: (),
}
SAMPLE: Mapping[SamplePhase, tuple[SamplePhase, ...]] = {
    SamplePhase.ROLLING: (SamplePhase.JUDGING, SamplePhase.DROPPED),
    SamplePhase.JUDGING: (SamplePhase.SCORED, SamplePhase.DROPPED),
    SamplePhase.SCORED: (SamplePhase.BATCHED, SamplePhase.DROPPED),
    SamplePhase.BATCHED: (SamplePhase.TRAINED,),
    SamplePhase.TRAINED: (),
    SamplePhase.DROPPED: (),
}

S = TypeVar("S", bound=StrEnum)


def _check(table: Mapping[S, tuple[S, ...]], what: str, now: S, to: S) -> S:
    if to not in table[now]:
        raise IllegalTransition(f"{what}: {now} -> {to}")
    return to


def move_lease(lease: Lease, to: LeaseState) -> None:
    if to is LeaseState.RELEASED and lease.running:
        raise IllegalTransition(f"lease {lease.epoch} released with {len(lease.running)} sequences on it")
    lease.state = _check(LEASE, f"lease {lease.epoch}", lease.state, to)


def begin_update(lease: Lease) -> None:
    """A rollout replica is to load a version: it gets no work until `end_update`."""
    lease.updating = True


def take_over(lease: Lease, version: int) -> None:
    """A rollout replica serves `version` from now on."""
    if version <= lease.version:
        raise IllegalTransition(f"lease {lease.epoch} went from version {lease.version} to {version}")
    lease.version = version


def end_update(lease: Lease) -> None:
    """The update is over, whether it took the new version over or was given up."""
    lease.updating = False


def begin_sample(sample: Sample, response: Sequence) -> None:
    """A sample of a group gets the sequence that will be its response."""
    sample.response = response
    sample.group.samples.append(sample)
    sample.group.rolling += 1


def begin_judging(sample: Sample, judgements: list[Sequence]) -> None:
    """ROLLING -> JUDGING: the response is finished, and judgements of it are asked for."""
    move_sample(sample, SamplePhase.JUDGING)
    sample.judgements = judgements
    sample.group.rolling -= 1
    sample.group.judging += 1


def score(sample: Sample, reward: float | None, true_accuracy: float | None) -> None:
    """JUDGING -> SCORED: all judgements are finished, and say what the response is worth."""
    move_sample(sample, SamplePhase.SCORED)
    sample.reward, sample.true_accuracy = reward, true_accuracy
    sample.group.judging -= 1


def retire(group: Group) -> None:
    """BATCHED -> TRAINED for all samples of a group. They let go of their sequences, so that a run holds what
    is under way, and not what it has ever made."""
    for sample in group.samples:
        move_sample(sample, SamplePhase.TRAINED)
        sample.response = None
        sample.judgements = []
    group.samples = []


def move_sample(sample: Sample, to: SamplePhase) -> None:
    sample.phase = _check(SAMPLE, f"sample {sample.id}", sample.phase, to)


def dispatch(sequence: Sequence, lease: Lease, now_ns: int) -> None:
    """WAITING -> RUNNING on an active replica of the right role and a young enough version."""
    if lease.state is not LeaseState.ACTIVE or lease.role is not sequence.role:
        raise IllegalTransition(
            f"sequence {sequence.id} ({sequence.role}) sent to a {lease.state} {lease.role} lease"
        )
    if lease.version < sequence.min_version:
        raise IllegalTransition(
            f"sequence {sequence.id} needs version {sequence.min_version}, lease has {lease.version}"
        )
    sequence.phase = _check(SEQUENCE, f"sequence {sequence.id}", sequence.phase, SequencePhase.RUNNING)
    sequence.lease_epoch = lease.epoch
    sequence.cached_tokens = 0
    lease.running[sequence.id] = sequence
    if sequence.began_ns < 0:
        sequence.began_ns = now_ns
        _count_begun(sequence, 1)


def extend(
    sequence: Sequence, version: int, count: int, tokens: Iterable[int] = (), logprobs: Iterable[float] = ()
) -> None:
    """Append `count` tokens written by `version`; a change of version starts a new segment."""
    if sequence.phase is not SequencePhase.RUNNING:
        raise IllegalTransition(f"sequence {sequence.id} is {sequence.phase} and got tokens")
    if count <= 0:
        return
    start, stop = sequence.length, sequence.length + count
    segments = sequence.segments
    if segments and segments[-1].version == version:
        segments[-1] = Segment(version, segments[-1].start, stop)
    else:
        segments.append(Segment(version, start, stop))
    sequence.length = stop
    sequence.tokens.extend(tokens)
    sequence.logprobs.extend(logprobs)


def leave(sequence: Sequence, lease: Lease, to: SequencePhase, end: End | None = None) -> None:
    """RUNNING -> DONE (`end` says why, where text is real), or back to WAITING with its tokens kept."""
    if sequence.lease_epoch != lease.epoch or sequence.id not in lease.running:
        raise IllegalTransition(f"sequence {sequence.id} is not on lease {lease.epoch}")
    sequence.phase = _check(SEQUENCE, f"sequence {sequence.id}", sequence.phase, to)
    sequence.lease_epoch = -1
    sequence.end = end
    del lease.running[sequence.id]
    if to is SequencePhase.DONE:
        _count_begun(sequence, -1)


def keep_cache(sequence: Sequence, cached_tokens: int, version: int) -> None:
    """The KV cache of so much of its context is in host memory, made by a policy version (-1: a judge's)."""
    sequence.cached_tokens, sequence.cached_version = cached_tokens, version


def _count_begun(sequence: Sequence, change: int) -> None:
    """Keep how many unfinished sequences of its group have begun, and when in the mean."""
    group, role = sequence.sample.group, sequence.role
    group.begun[role] = group.begun.get(role, 0) + change
    group.begun_ns[role] = group.begun_ns.get(role, 0) + change * sequence.began_ns


def check_owners(leases: Iterable[Lease]) -> None:
    """Every device has at most one owner among live leases."""
    owner: dict[int, Lease] = {}
    for lease in leases:
        if lease.state in (LeaseState.RELEASED, LeaseState.LOST):
            continue
        for device in lease.placement.devices:
            if device in owner:
                raise IllegalTransition(
                    f"device {device} is owned by leases {owner[device].epoch} and {lease.epoch}"
                )
            owner[device] = lease


def check_plan(placements: Iterable[Placement]) -> None:
    """Placements do not share devices."""
    seen: set[int] = set()
    for placement in placements:
        for device in placement.devices:
            if device in seen:
                raise IllegalTransition(f"plan gives device {device} to two placements")
            seen.add(device)

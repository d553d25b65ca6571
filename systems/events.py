"""What happens in a run, as types: one small class a kind of event, for who writes it and who reads it.

`encode` gives the object that is a line of `events.jsonl`, `decode` gives the event back.

Invariants
* `decode(encode(event)) == event`, through JSON too, but for tuples inside of records, which JSON gives back
  as lists. A line that is read and written again is the same line, byte for byte.
* A line's keys and their order are those of the class: `t`, `kind`, then the fields. A field whose name here
  says more than its key in the file (a unit, mostly) names that key with `key`.
* A field that is None by default is left out of the line when it is None: older logs do not have it.
* A line of an unknown kind, with a field too many or too few, is no event: `decode` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform, get_type_hints

from systems.types import End, How, LeaseState, Placement, Publishing, Role, Step

EVENT_SCHEMA = 2  # 1: an event a sequence, other estimates in views, no progress of batches
T_KEY, KIND_KEY = "t", "kind"


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that happened, `t_ns` nanoseconds after the run began, in the run's own time."""

    kind: ClassVar[str]
    t_ns: int


class EventSink(Protocol):
    """Where events go: one call an event, in order."""

    def emit(self, event: Event) -> None: ...


class _Field(NamedTuple):
    """How one field is written and read."""

    name: str
    key: str
    optional: bool
    write: Callable[[Any], Any] | None
    read: Callable[[Any], Any] | None


class _Shape(NamedTuple):
    """How a whole event is written: its values in the order of the file, and those that need more."""

    keys: tuple[str, ...]
    values: Callable[[Event], tuple[Any, ...]]
    optional: tuple[str, ...]
    written: tuple[tuple[str, Callable[[Any], Any]], ...]


E = TypeVar("E", bound=Event)
KINDS: dict[str, type[Event]] = {}  # by kind
_FIELDS: dict[str, tuple[_Field, ...]] = {}  # by kind, in the order of the file
_SHAPES: dict[str, _Shape] = {}  # by kind


def key(name: str) -> Any:
    """A field that is called `name` in the file."""
    return field(metadata={"key": name})


@dataclass_transform(kw_only_default=True)
def _event(kind: str) -> Callable[[type[E]], type[E]]:
    def declare(cls: type[E]) -> type[E]:
        # Not frozen, which would make each of the hundreds of thousands of a run take three times as long.
        made = dataclass(slots=True, kw_only=True)(cls)
        made.kind = kind
        KINDS[kind] = made
        hints = get_type_hints(made)
        _FIELDS[kind] = tuple(
            _Field(
                one.name, one.metadata.get("key", one.name), one.default is not MISSING,
                *_CODECS.get(hints[one.name], (None, None)),
            )
            for one in fields(made)
            if one.name != "t_ns"
        )  # fmt: skip
        listed = _FIELDS[kind]
        _SHAPES[kind] = _Shape(
            (T_KEY, KIND_KEY, *(one.key for one in listed)),
            attrgetter("t_ns", "kind", *(one.name for one in listed)),
            tuple(one.key for one in listed if one.optional),
            tuple((one.key, one.write) for one in listed if one.write is not None),
        )
        return made

    return declare


def encode(event: Event) -> dict[str, Any]:
    """The object that stands for `event` in the file."""
    shape = _SHAPES[event.kind]
    raw: dict[str, Any] = dict(zip(shape.keys, shape.values(event), strict=True))
    for name in shape.optional:
        if raw[name] is None:
            del raw[name]
    for name, write in shape.written:
        if name in raw:
            raw[name] = write(raw[name])
    return raw


def decode(raw: Mapping[str, Any]) -> Event:
    """The inverse of `encode`, and of JSON. Raises `LookupError`, `TypeError` or `ValueError`.

    Events of schema 1 that are written otherwise today are read as today's.
    """
    kind = raw[KIND_KEY]
    if kind in _BEFORE:
        raw = _BEFORE[kind](raw)
        kind = raw[KIND_KEY]
    if kind not in KINDS:
        raise ValueError(f"there is no kind of event {kind!r}")
    given: dict[str, Any] = {"t_ns": raw[T_KEY]}
    for name, name_there, optional, _, read in _FIELDS[kind]:
        if optional and name_there not in raw:
            continue
        value = raw[name_there]
        given[name] = read(value) if read is not None else value
    if len(given) + 1 != len(raw):
        known = {T_KEY, KIND_KEY, *(one.key for one in _FIELDS[kind])}
        raise ValueError(f"{kind} has no field {', '.join(sorted(raw.keys() - known))}")
    return KINDS[kind](**given)


def _one_dispatched(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 1 had an event for each sequence that went to a replica, and no caches."""
    lists = {new: [raw[old]] for new, old in (("sequences", "sequence"), ("leases", "lease"),
                                              ("contexts", "context"), ("resumed", "resumed"))}  # fmt: skip
    dispatched = {T_KEY: raw[T_KEY], KIND_KEY: SequencesDispatched.kind, "role": raw["role"]}
    return {**dispatched, **lists, "cached": [0]}


def _one_requeued(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 1 had an event for each sequence that came back."""
    same = {name: raw[name] for name in (T_KEY, "role", "lease", "why")}
    lists = {"sequences": [raw["sequence"]], "tokens": [raw["tokens"]]}
    return {**same, KIND_KEY: SequencesRequeued.kind, **lists}


_BEFORE: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "sequence.dispatched": _one_dispatched,
    "sequence.requeued": _one_requeued,
}


def devices_of(shift: ShiftBegan) -> tuple[int, ...]:
    """The devices that a shift changes, sorted."""
    return tuple(sorted({d for placed in shift.sources + shift.targets for d in placed.devices}))


def _written_placements(placements: tuple[Placement, ...]) -> list[list[Any]]:
    return [[placement.role, list(placement.devices)] for placement in placements]


def _read_placements(raw: list[list[Any]]) -> tuple[Placement, ...]:
    return tuple(Placement(Role(role), tuple(devices)) for role, devices in raw)


# How the types of fields are written and read, where JSON does not give back what it was given.
_CODECS: dict[Any, tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]] = {
    Role: (None, Role),
    LeaseState: (None, LeaseState),
    How: (None, How),
    Step: (None, Step),
    Publishing: (None, Publishing),
    End | None: (None, End),
    tuple[int, ...]: (list, tuple),
    tuple[int, ...] | None: (list, tuple),
    tuple[int, int]: (list, tuple),
    tuple[dict[str, float], ...]: (list, tuple),
    tuple[Placement, ...]: (_written_placements, _read_placements),
}


# ------------------------------------------------------------------------------------------------ the run


@_event("run.began")
class RunBegan(Event):
    """The first event: what every later one is read with."""

    schema: int
    kind_of_numbers: str
    system: str
    model: str
    policy: str
    judge: str
    seed: int
    gpus: int
    token_scale: int
    extrapolated: bool  # kernel times on this device come from another one
    staleness_bound: int
    steps: int
    samples_per_group: int
    judge_calls: int
    publishing: Publishing
    template: dict[str, int]  # devices by role
    floor: dict[str, Any]  # what the lower bound is computed from
    cores: int | None = None  # of this machine, and whether workers share them: measured runs only
    oversubscribed: bool | None = None
    steady: dict[str, float] | None = None  # the steady fluid optimum, seconds a step: modelled runs only
    machine: str | None = None  # which plausible machine, as in "3 of 16"; None: the nominal one


@_event("run.ended")
class RunEnded(Event):
    """The run ended by itself. `weights_sha256` is None where nothing is learned."""

    weights_sha256: str | None


@_event("run.stopped")
class RunStopped(Event):
    """The run did not end by itself. `where` is one line for people."""

    where: str


# ------------------------------------------------------------------------------------------------ samples


@_event("batch.admitted")
class BatchAdmitted(Event):
    """The prompts of a batch may be rolled out. `groups` are the first and the last."""

    batch: int
    version: int
    groups: tuple[int, int]


@_event("sequences.dispatched")
class SequencesDispatched(Event):
    """Sequences of a role went to replicas at one moment; the lists are parallel. Of their contexts,
    `resumed_tokens` were generated before, and `cached_tokens` come with their KV cache."""

    role: Role
    sequences: list[int]
    leases: list[int]
    context_tokens: list[int] = key("contexts")
    resumed_tokens: list[int] = key("resumed")
    cached_tokens: list[int] = key("cached")


@_event("sequences.requeued")
class SequencesRequeued(Event):
    """Sequences of a replica are back in the queue with their tokens; the lists are parallel. `why` is shift,
    rebalance, publish or loss."""

    role: Role
    lease: int
    why: str
    sequences: list[int]
    tokens: list[int]


@_event("sequence.finished")
class SequenceFinished(Event):
    """A sequence ended. `end` says why, where text is real."""

    sequence: int
    role: Role
    lease: int
    tokens: int
    oldest_version: int = key("oldest")
    segments: int
    end: End | None = None


@_event("sample.scored")
class SampleScored(Event):
    """All judgements of a sample are there. `unparsable` are the sequences of those without a verdict, where
    text is real."""

    sample: int
    reward: float | None
    true_accuracy: float | None = key("true")
    unparsable: tuple[int, ...] | None = None


@_event("chunk.dropped")
class ChunkDropped(Event):
    """An answer was stale or doubled."""

    sequence: int
    lease: int


# ------------------------------------------------------------------------------------------------ training


@_event("batch.taken")
class BatchTaken(Event):
    """The trainer's next batch is complete."""

    step: int
    groups: tuple[int, ...]


@_event("train.began")
class TrainBegan(Event):
    """Training of one RL step began."""

    step: int
    lease: int


@_event("train.ended")
class TrainEnded(Event):
    """Training of one RL step ended."""

    step: int
    lease: int


@_event("train.lost")
class TrainLost(Event):
    """The training unit was lost: the RL step begins again."""

    step: int
    why: str


@_event("version.published")
class VersionPublished(Event):
    """The end of an RL step. `stats` has what each of its optimizer steps reports."""

    version: int
    stats: tuple[dict[str, float], ...]


# ------------------------------------------------------------------------------------------------ devices


@_event("lease")
class LeaseMoved(Event):
    """A lease was made, or changed its state."""

    lease: int
    role: Role
    state: LeaseState
    devices: tuple[int, ...]


@_event("lease.updating")
class LeaseUpdating(Event):
    """A rollout replica began to load a policy version."""

    lease: int
    version: int


@_event("lease.updated")
class LeaseUpdated(Event):
    """A rollout replica serves `version`: the new one, or the old one if the update was given up."""

    lease: int
    version: int


@_event("shift.began")
class ShiftBegan(Event):
    """A shift began: `sources` drain, `targets` will have the devices."""

    shift: int
    how: How
    sources: tuple[Placement, ...]
    targets: tuple[Placement, ...]


@_event("shift.phase")
class ShiftPhase(Event):
    """A phase of a shift ended, having moved so many bytes a device."""

    shift: int
    phase: Step
    bytes_moved: int = key("bytes")


@_event("shift.ended")
class ShiftEnded(Event):
    """A shift ended: its targets are ready, or it failed."""

    shift: int
    ok: bool


@_event("decision")
class Decision(Event):
    """The policy changed its mind. `memory` and `view` are records of everything that it was shown."""

    why: str
    how: How
    placements: tuple[Placement, ...]
    memory: dict[str, Any]
    view: dict[str, Any]


@_event("device.lost")
class DeviceLost(Event):
    """A worker died or was given up."""

    device: int
    why: str


@_event("device.back")
class DeviceBack(Event):
    """A lost device can be leased again."""

    device: int

"""The vocabulary of the harness: roles, devices, placements, work, and what a policy sees.

Frozen classes are values that may be kept and compared. The few mutable ones (`Sequence`, `Sample`, `Group`,
`Lease`) are owned by the runtime and the pipeline; only `lifecycle` changes them.
Units are in names: `_ns`, `_s`, `_tokens`, `_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

NS_PER_S = 1_000_000_000


class Role(StrEnum):
    """What a device works on. Rollout and reward are the same kind of worker with another model."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"


SERVING = (Role.ROLLOUT, Role.REWARD)


class Kind(StrEnum):
    """Where a number comes from. Figures and comparisons never mix kinds silently."""

    MEASURED = "measured"  # wall clock, real work
    COSIMULATED = "cosimulated"  # real tokens, verdicts and gradients; durations from the cost model
    SIMULATED = "simulated"  # lengths from a distribution or trace; durations from the cost model
    QUOTED = "quoted"  # printed by somebody else


class How(StrEnum):
    """What happens to the sequences on a replica that is to shift."""

    MIGRATE = "migrate"  # abort them, keep their tokens, continue elsewhere
    FINISH = "finish"  # let them end first


class Publishing(StrEnum):
    """How a new policy version reaches rollout replicas that are generating."""

    INTERRUPT = "interrupt"  # abort, load, continue under the new version as a new segment
    DRAIN = "drain"  # let running sequences end under the old version first
    IN_FLIGHT = "in-flight"  # load under them: they go on with their KV cache, as a new segment


class Router(StrEnum):
    """How a waiting sequence finds its replica."""

    LATENCY = "latency"  # where it will be served best; sequences are moved when a replica comes
    ROUND_ROBIN = "round-robin"  # the next replica in turn; nothing is moved for balance


class Handover(StrEnum):
    """What becomes of the KV cache of a sequence that goes from one replica to another."""

    REREAD = "reread"  # it is dropped, and the next replica reads the context in again
    COPY = "copy"  # it goes to host memory, and from there to the next replica


# --------------------------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One accelerator, or one logical CPU device."""

    id: int
    node: int
    spec: str


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """One serving replica, or the one training unit, and the devices it owns (sorted ids)."""

    role: Role
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Desired state: a sorted tuple of placements that do not share devices.

    `revisit_ns` asks to be woken again at that time even if nothing happens until then.
    `why` is one line for people.
    """

    placements: tuple[Placement, ...]
    how: How = How.MIGRATE
    why: str = ""
    revisit_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Shift:
    """The smallest set of placements that must change together: they share devices.

    `sources` give up their devices, `targets` take them; free devices need no source.
    """

    id: int
    sources: tuple[Placement, ...]
    targets: tuple[Placement, ...]
    how: How

    @property
    def devices(self) -> tuple[int, ...]:
        owned = {device for placement in self.sources + self.targets for device in placement.devices}
        return tuple(sorted(owned))


class Step(StrEnum):
    """The phases of a shift, in order."""

    DRAIN = "drain"  # sequences leave, or a training step ends
    PARK = "park"  # state that must survive (optimizer) goes to host memory
    RELEASE = "release"  # caches, parameters and graphs of the old role are given up
    LOAD = "load"  # parameters of the new role are read from the parameter store
    WARM = "warm"  # allocator, graphs and communicators of the new role
    READY = "ready"  # the replica may be given work


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """A shift finished `step` at this moment, having moved `bytes_moved` bytes per device."""

    step: Step
    bytes_moved: int = 0


class LeaseState(StrEnum):
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"
    RELEASED = "released"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Lease:
    """A placement's right to its devices. Epochs only grow; answers with a stale one are dropped."""

    placement: Placement
    epoch: int
    state: LeaseState = LeaseState.LOADING
    version: int = -1  # policy version it serves (rollout), or -1
    updating: bool = False  # a new version is being loaded; gets no work until then
    running: dict[int, Sequence] = field(default_factory=dict)  # by sequence id, in dispatch order

    @property
    def role(self) -> Role:
        return self.placement.role


@dataclass(frozen=True, slots=True)
class Layout:
    """What a policy may arrange: devices, widths and the template split.

    `width[role]` is the number of devices of one replica; for `TRAIN` it is the step in which the
    training unit may grow. `template` is the static split, in devices a role. `block` is the smallest
    number of devices that any role can take over whole.
    """

    devices: tuple[Device, ...]
    width: Mapping[Role, int]
    template: Mapping[Role, int]
    train_min: int

    @property
    def block(self) -> int:
        return max(self.width[Role.ROLLOUT], self.width[Role.REWARD])


# ------------------------------------------------------------------------------------------------ work


class SamplePhase(StrEnum):
    ROLLING = "rolling"
    JUDGING = "judging"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


class SequencePhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DROPPED = "dropped"


class End(StrEnum):
    """Why a generation ended, in the words that serving engines use."""

    STOP = "stop"  # the model ended it
    LENGTH = "length"  # it was cut off at its cap


class Segment(NamedTuple):
    """Generated tokens [start, stop) were written by policy version `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sequence starts from. `tokens` is empty in a simulation, where only `length` matters."""

    length: int
    tokens: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation: a response, or one judgement of a response.

    `length` counts generated tokens; `tokens` and `logprobs` hold them where they are real.
    `min_version` is the oldest policy version that may write it; `key` is what its noise belongs to.
    """

    id: int
    sample: Sample
    role: Role
    prompt: Prompt
    key: int
    min_version: int = 0
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    phase: SequencePhase = SequencePhase.WAITING
    began_ns: int = -1  # when it first ran
    cached_tokens: int = 0  # of its context, whose KV cache is in host memory
    cached_version: int = -1  # the policy version that made that cache; -1 for a judge's
    lease_epoch: int = -1
    end: End | None = None  # once it is done, where text is real

    @property
    def context_tokens(self) -> int:
        return self.prompt.length + self.length


@dataclass(slots=True, eq=False)
class Sample:
    """One response of a group and its judgements."""

    id: int
    group: Group
    phase: SamplePhase = SamplePhase.ROLLING
    response: Sequence | None = None
    judgements: list[Sequence] = field(default_factory=list)
    reward: float | None = None
    true_accuracy: float | None = None

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token (staleness is counted from it)."""
        segments = response_of(self).segments
        if not segments:
            raise ValueError(f"sample {self.id} has no tokens")
        return min(segment.version for segment in segments)


def response_of(sample: Sample) -> Sequence:
    """The response of a sample that has one. Raises `ValueError` for one that was never begun."""
    if sample.response is None:
        raise ValueError(f"sample {sample.id} has no response")
    return sample.response


@dataclass(slots=True, eq=False)
class Group:
    """One prompt's samples: the unit of admission and of batching."""

    id: int
    prompt: Prompt
    admitted_version: int
    samples: list[Sample] = field(default_factory=list)
    rolling: int = 0  # samples whose response is unfinished
    judging: int = 0  # samples whose judgements are unfinished
    begun: dict[Role, int] = field(default_factory=dict)  # unfinished sequences that were ever begun
    begun_ns: dict[Role, int] = field(default_factory=dict)  # the sum of the moments at which they were


@dataclass(frozen=True, slots=True)
class Recipe:
    """The RL step: how many prompts, samples, mini-batches and judgements, and the staleness bound."""

    steps: int
    prompts: int
    samples: int
    mini_batches: int
    micro_batch_samples: int
    judge_calls: int
    staleness: int
    publishing: Publishing
    handover: Handover = Handover.REREAD
    router: Router = Router.LATENCY


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one optimizer step reports; empty where nothing real was computed."""

    values: dict[str, float] = field(default_factory=dict)


class NotFinite(ArithmeticError):
    """Training produced something that is not a finite number: what follows would mean nothing."""


# ------------------------------------------------------------------------------- what a policy is shown


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A lease as a policy or the scheduler sees it."""

    epoch: int
    placement: Placement
    state: LeaseState
    running: int
    kv_tokens: int
    version: int

    @property
    def role(self) -> Role:
        return self.placement.role


@dataclass(frozen=True, slots=True)
class Speed:
    """Throughput model of one replica: inter-token latency = a * KV + max(b, c * n) + d, in seconds.

    The form is the one that the paper's planner is configured with (source: artifact-readme).
    """

    a: float
    b: float
    c: float
    d: float
    max_running: int
    kv_capacity_tokens: int
    ahead: int = 8  # sequences queued at a full replica, so that it never waits for the control process

    def itl_s(self, running: float, kv_tokens: float) -> float:
        compute = self.c * running
        return self.a * kv_tokens + (compute if compute > self.b else self.b) + self.d

    def tokens_per_s(self, running: int, kv_tokens: float) -> float:
        running = min(running, self.max_running)
        return running / self.itl_s(running, kv_tokens) if running else 0.0


@dataclass(frozen=True, slots=True)
class Estimates:
    """What is known in advance or was observed: never the future of a running sequence.

    Lengths are in tokens, seeded by the workload's prior; quantiles are at `estimates.lengths.LEVELS`.
    One RL step's training is `train_device_s` device-seconds that a unit's devices share, and `train_fixed_s`
    seconds that they do not. A shift takes `shift_s`; `reprefill_s` is reading a mean context in again.
    """

    speed: Mapping[Role, Speed]
    length_mean: Mapping[Role, float]
    length_cv: Mapping[Role, float]
    prompt_mean: Mapping[Role, float]
    length_quantiles: Mapping[Role, tuple[float, ...]]
    train_device_s: float
    train_fixed_s: float
    shift_s: float
    reprefill_s: Mapping[Role, float]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Estimates:
        """The inverse of `asdict` and of JSON, which knows no roles."""

        def by_role(key: str) -> dict[Role, Any]:
            return {Role(role): value for role, value in record[key].items()}

        speed = {role: Speed(**known) for role, known in by_role("speed").items()}
        known = {key: by_role(key) for key in ("length_mean", "length_cv", "prompt_mean", "reprefill_s")}
        quantiles = {role: tuple(listed) for role, listed in by_role("length_quantiles").items()}
        return cls(**{**record, **known, "speed": speed, "length_quantiles": quantiles})


@dataclass(frozen=True, slots=True)
class Training:
    """The training unit: how far the current RL step is. `started_ns` is None when it is idle."""

    version: int
    started_ns: int | None
    batch_ready: bool


class Coming(NamedTuple):
    """A batch in the making: its samples by phase, and how far they are.

    `rolling_since_ns` and `judging_since_ns` are when its unfinished sequences of that role began, in the
    mean; None where none has.
    """

    rolling: int
    judging: int
    scored: int
    rolling_since_ns: int | None = None
    judging_since_ns: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """An immutable picture of the cluster. Counts of work are sequences, by serving role.

    `coming` has the admitted samples by the batch that they will be in, the next batch first.
    """

    now_ns: int
    layout: Layout
    recipe: Recipe
    replicas: tuple[ReplicaView, ...]
    down: tuple[int, ...]  # devices that cannot be used now
    shifting: tuple[int, ...]  # devices with a shift in progress
    waiting: Mapping[Role, int]
    running: Mapping[Role, int]
    coming: tuple[Coming, ...]
    training: Training
    estimates: Estimates

    def outstanding(self, role: Role) -> int:
        return self.waiting[role] + self.running[role]

    def of(self, role: Role) -> tuple[ReplicaView, ...]:
        return tuple(replica for replica in self.replicas if replica.role is role)

    def describe(self) -> str:
        """One line for people."""
        parts = [f"t={self.now_ns / 1e9:.3f} s version={self.training.version}"]
        for role in Role:
            replicas = self.of(role)
            states = ", ".join(sorted({r.state.value for r in replicas})) or "none"
            work = f"{self.waiting[role]} waiting {self.running[role]} running" if role in SERVING else (
                f"batch {'ready' if self.training.batch_ready else 'not ready'}"
            )  # fmt: skip
            parts.append(f"{role}: {len(replicas)} placed ({states}), {work}")
        return "; ".join(parts)

    def record(self) -> dict[str, Any]:
        """JSON form for the event log; layout and recipe are left out, a run records them once."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        del shown["layout"], shown["recipe"]
        shown["replicas"] = [
            [r.epoch, r.role, list(r.placement.devices), r.state, r.running, r.kv_tokens, r.version]
            for r in self.replicas
        ]
        shown["coming"] = [list(batch) for batch in self.coming]
        shown["training"] = asdict(self.training)
        shown["estimates"] = asdict(self.estimates)
        return shown

    @classmethod
    def from_record(cls, record: Mapping[str, Any], layout: Layout, recipe: Recipe) -> View:
        """The inverse of `record` and of JSON. Raises `LookupError`, `TypeError` or `ValueError`."""
        replicas = tuple(
            ReplicaView(epoch, Placement(Role(role), tuple(devices)), LeaseState(state), *counts)
            for epoch, role, devices, state, *counts in record["replicas"]
        )
        known = {
            "replicas": replicas,
            **{key: tuple(record[key]) for key in ("down", "shifting")},
            **{key: {role: record[key][role] for role in SERVING} for key in ("waiting", "running")},
            "coming": tuple(Coming(*batch) for batch in record["coming"]),
            "training": Training(**record["training"]),
            "estimates": Estimates.from_record(record["estimates"]),
        }
        return cls(layout=layout, recipe=recipe, **{**record, **known})


M = TypeVar("M")


class Policy(Protocol[M]):
    """An RL system, reduced to the one thing in which systems differ.

    `plan` is pure. `memory` is a frozen value that survives between calls; the runtime owns it.
    One that `time_shares` devices runs on fewer than the three roles need side by side.
    """

    name: str
    default_staleness: int
    time_shares: bool

    def begin(self, layout: Layout) -> M:
        """The memory before the first view."""
        ...

    def plan(self, view: View, memory: M) -> tuple[Plan, M]:
        """The placement that this system wants now."""
        ...

"""From events to numbers. Everything that a summary says is derived here, and only from the events.

Used twice: while a run goes on (progress), and on its log afterwards (`bench show --recompute`).
Device time is split into five shares. A serving device works for its role while its replica has a
sequence; `shifting` is from the end of a shift's drain to its targets being ready, and the loading of
a new policy version; training is from the start of an RL step's training to its publish; the rest is
idle. Time after the last publish does not count.

A response or judgement is truncated if it was cut off at its cap instead of ending by itself. Real text says
so in its event; where only lengths are simulated, those that reach the cap of the run's manifest count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harness.results.loss import Spent, loss_of
from systems.costs.bounds import Floor, Price, SampleWork, ServingFloor, least
from systems.events import (
    BatchAdmitted,
    BatchTaken,
    DeviceLost,
    Event,
    LeaseMoved,
    LeaseUpdated,
    LeaseUpdating,
    RunBegan,
    RunEnded,
    SampleScored,
    SequenceFinished,
    SequencesDispatched,
    SequencesRequeued,
    ShiftBegan,
    ShiftEnded,
    ShiftPhase,
    TrainBegan,
    TrainEnded,
    TrainLost,
    VersionPublished,
    devices_of,
)
from systems.types import SERVING, End, LeaseState, Role, Step

SUMMARY_SCHEMA = 4
NS = 1e9
# Above this share of a run's responses (or judgements) a summary warns: a twentieth of the rewards would then
# be of texts that nobody finished, or of verdicts that nobody gave.
UNSTEADY = 5  # publishes until a run with a bound of 2 has forgotten that all batches began together
WORTH_A_WARNING = 0.05
NOMINAL_MACHINE = "nominal"  # where nothing was drawn from the bands of the cost model


class Share(StrEnum):
    """What device time is spent on. The one list, in the order in which it is shown."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    SHIFTING = "shifting"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Caps:
    """Longest generations that a run allows, in tokens; None where there is no cap or text says it itself."""

    response: int | None = None
    judgement: int | None = None


@dataclass(slots=True)
class _Sample:
    prompt: int = 0
    response: int = 0
    judge_prompt: int = 0
    judgements: list[int] = field(default_factory=list)
    response_truncated: bool | None = None
    truncated: dict[int, bool] = field(default_factory=dict)  # judgements by sequence, where that is known
    unparsable: tuple[int, ...] | None = None  # judgements without a verdict; None where text is not real
    oldest: int = 0
    admitted: int = 0
    first: bool = False  # of its group
    reward: float | None = None
    true: float | None = None


@dataclass(slots=True)
class _Owner:
    """A lease or a shift: which share its devices' time goes to since when."""

    works: Share  # what it does while it runs
    devices: tuple[int, ...]
    share: Share | None = None
    since: int = 0
    running: int = 0
    updating: bool = False
    leaving: bool = False  # it drains: its idle time is nobody's any more


class Tally:
    """Feed it every event in order; ask it for steps and the summary at any time.

    `stepped` is called after every RL step, `spent` with every interval of device time that belongs to a
    share: (devices, share, from ns, to ns).
    """

    def __init__(
        self, stepped: Callable[[Tally], None] = lambda _: None,
        spent: Callable[[tuple[int, ...], Share, int, int], None] | None = None, caps: Caps | None = None,
    ) -> None:  # fmt: skip
        self._stepped = stepped
        self._spent = spent
        self._caps = caps or Caps()
        self.steps: list[dict[str, Any]] = []
        self.migrations = 0
        self.ended: RunEnded | None = None
        self._began: RunBegan | None = None
        self._samples: dict[int, _Sample] = defaultdict(_Sample)
        self._admitted: dict[int, int] = {}  # group -> version
        self._batch: tuple[int, ...] = ()  # groups of the batch that is being trained on
        self._taken_ns = self._train_began_ns = self._last_publish_ns = 0
        self._leases: dict[int, _Owner] = {}
        self._shifts: dict[int, _Owner] = {}
        self._device_ns: dict[Share, float] = defaultdict(float)
        self._busy: dict[Share, int] = defaultdict(int)  # owners that work for a share now
        self._busy_since: dict[Share, int] = {}
        self._busy_ns: dict[Share, int] = defaultdict(int)  # since the last publish, anybody working for it
        self._published_device_ns: dict[Share, float] = {}  # the same, as of the last publish
        self._idle_ns: dict[Share, float] = defaultdict(float)  # of leases, by what they are for
        self._loading_ns = 0.0  # of shifting: replicas that load a version
        self._reread: dict[tuple[Role, str], int] = defaultdict(int)  # tokens
        self._spent_until = Spent()  # as of the last publish
        self._left: dict[int, tuple[int, str]] = {}  # sequence -> (lease it left, why)
        self._phase_began: dict[int, int] = {}
        self._phases: dict[Step, list[float]] = defaultdict(list)  # wall seconds, shifts that did them
        self._phase_device_s: dict[Step, float] = defaultdict(float)
        self._done_shifts = 0
        self._failed_shifts = 0
        self._with_sources: set[int] = set()  # shifts that took devices from a role, not first placements
        self._work: list[list[SampleWork]] = []
        self._staleness: list[int] = []
        self._losses = 0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunBegan: self._on_began,
            RunEnded: self._on_ended,
            BatchAdmitted: self._on_admitted,
            SequencesDispatched: self._on_dispatched,
            SequencesRequeued: self._on_requeued,
            SequenceFinished: self._on_finished,
            SampleScored: self._on_scored,
            BatchTaken: self._on_taken,
            TrainBegan: self._on_train_began,
            TrainEnded: self._on_train_ended,
            TrainLost: self._on_train_lost,
            VersionPublished: self._on_published,
            LeaseMoved: self._on_lease,
            LeaseUpdating: self._on_updating,
            LeaseUpdated: self._on_updated,
            ShiftBegan: self._on_shift_began,
            ShiftPhase: self._on_shift_phase,
            ShiftEnded: self._on_shift_ended,
            DeviceLost: self._on_device_lost,
        }

    def add(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    # ------------------------------------------------------------------------------- the run

    @property
    def began(self) -> RunBegan:
        """The first event. Raises `LookupError` where the log does not begin with it."""
        if self._began is None:
            raise LookupError("run.began")
        return self._began

    def _on_began(self, event: RunBegan) -> None:
        self._began = event

    def _on_ended(self, event: RunEnded) -> None:
        self.ended = event

    # ------------------------------------------------------------------------------- samples

    def _on_admitted(self, event: BatchAdmitted) -> None:
        first, last = event.groups
        for group in range(first, last + 1):
            self._admitted[group] = event.version

    def _sample_of(self, sequence: int) -> _Sample:
        return self._samples[sequence // (1 + self.began.judge_calls)]

    def _on_dispatched(self, event: SequencesDispatched) -> None:
        rollouts, left = event.role is Role.ROLLOUT, self._left
        columns = (
            event.sequences, event.leases, event.context_tokens, event.resumed_tokens, event.cached_tokens,
        )  # fmt: skip
        for sequence, lease, context, resumed, cached in zip(*columns, strict=True):
            sample = self._sample_of(sequence)
            if rollouts:
                sample.prompt = context - resumed
            else:
                sample.judge_prompt = context - resumed
            if sequence in left:
                came_from, why = left.pop(sequence)
                self._reread[event.role, why] += context - cached
                if came_from != lease and why in ("shift", "rebalance"):
                    self.migrations += resumed > 0
            owner = self._leases[lease]
            owner.running += 1
            if owner.running == 1:
                self._account(owner, event.t_ns)

    def _on_requeued(self, event: SequencesRequeued) -> None:
        for sequence in event.sequences:
            self._left[sequence] = (event.lease, event.why)
        self._fewer(event.lease, len(event.sequences), event.t_ns)

    def _on_finished(self, event: SequenceFinished) -> None:
        sample = self._sample_of(event.sequence)
        if event.role is Role.ROLLOUT:
            sample.response = event.tokens
            sample.oldest = event.oldest_version
            sample.response_truncated = _truncated(event, self._caps.response)
        else:
            sample.judgements.append(event.tokens)
            truncated = _truncated(event, self._caps.judgement)
            if truncated is not None:
                sample.truncated[event.sequence] = truncated
        self._fewer(event.lease, 1, event.t_ns)

    def _fewer(self, lease: int, count: int, t_ns: int) -> None:
        owner = self._leases.get(lease)
        if owner is not None:
            owner.running -= count
            if owner.running == 0:
                self._account(owner, t_ns)

    def _on_scored(self, event: SampleScored) -> None:
        sample = self._samples[event.sample]
        sample.reward, sample.true = event.reward, event.true_accuracy
        sample.unparsable = event.unparsable

    # ------------------------------------------------------------------------------- training steps

    def _on_taken(self, event: BatchTaken) -> None:
        self._batch = event.groups
        self._taken_ns = event.t_ns

    def _on_train_began(self, event: TrainBegan) -> None:
        self._train_began_ns = event.t_ns
        self._train(event, True)

    def _on_train_ended(self, event: TrainEnded) -> None:
        self._train(event, False)

    def _on_train_lost(self, event: TrainLost) -> None:
        for owner in self._leases.values():
            if owner.works is Share.TRAIN and owner.running:
                owner.running = 0
                self._account(owner, event.t_ns)

    def _train(self, event: TrainBegan | TrainEnded, running: bool) -> None:
        owner = self._leases.get(event.lease)
        if owner is not None:
            owner.running = int(running)
            self._account(owner, event.t_ns)

    def _on_published(self, event: VersionPublished) -> None:
        now, step = event.t_ns, event.version - 1
        per_group = self.began.samples_per_group
        samples = []
        for group in self._batch:
            for index in range(per_group):
                sample = self._samples.pop(group * per_group + index)
                sample.admitted = self._admitted[group]
                sample.first = index == 0
                samples.append(sample)
        staleness = [step - sample.oldest for sample in samples]
        self._staleness.extend(staleness)
        self._work.append(
            [
                SampleWork(
                    s.admitted,
                    s.prompt,
                    s.response,
                    s.judge_prompt,
                    tuple(s.judgements),
                    s.prompt if s.first else 0,
                )
                for s in samples
            ]
        )
        judged = [length for sample in samples for length in sample.judgements]
        self.steps.append(
            {
                "step": step,
                "step_s": (now - self._last_publish_ns) / NS,
                "reward": _mean([s.reward for s in samples]),
                "true_accuracy": _mean([s.true for s in samples]),
                "response_tokens_mean": _mean([s.response for s in samples]),
                "response_tokens_max": max(s.response for s in samples),
                "judge_tokens_mean": _mean(judged) or 0.0,
                "policy_tokens": sum(s.response for s in samples),
                "judge_tokens": sum(judged),
                "responses": len(samples),
                "judgements": len(judged),
                **_cut_off(samples),
                "staleness_mean": _mean(staleness),
                "staleness_max": max(staleness),
                "wait_for_batch_s": max(0.0, (self._taken_ns - self._last_publish_ns) / NS),
                "wait_for_trainer_s": (self._train_began_ns - self._taken_ns) / NS,
                "gen_s": self._busy_s(Share.ROLLOUT, now),
                "reward_s": self._busy_s(Share.REWARD, now),
                "train_s": (now - self._train_began_ns) / NS,
                "published_s": now / NS,
                **{f"learn_{k}": v for k, v in _mean_stats(event.stats).items()},
            }
        )
        self._last_publish_ns = now
        for owner in [*self._leases.values(), *self._shifts.values()]:
            self._account(owner, now)
        self._published_device_ns = dict(self._device_ns)
        self._spent_until = self._spent_now()
        self._stepped(self)

    # ------------------------------------------------------------------------------- device time

    def _account(self, owner: _Owner, now: int) -> None:
        """Close the interval that ends now and open the next one."""
        if owner.share is not None:
            self._device_ns[owner.share] += (now - owner.since) * len(owner.devices)
            if owner.share is Share.SHIFTING and owner.works is not Share.SHIFTING:
                self._loading_ns += (now - owner.since) * len(owner.devices)
            if self._spent is not None and now > owner.since:
                self._spent(owner.devices, owner.share, owner.since, now)
        elif not owner.leaving:
            self._idle_ns[owner.works] += (now - owner.since) * len(owner.devices)
        owner.since, before = now, owner.share
        if owner.updating:
            owner.share = Share.SHIFTING
        else:
            owner.share = owner.works if owner.running else None
        if owner.share != before:
            self._work_for(before, -1, now)
            self._work_for(owner.share, 1, now)

    def _spent_now(self) -> Spent:
        """Device time by cause until this moment, in seconds."""
        loading_s = self._loading_ns / NS
        return Spent(
            {role: self._device_ns[Share(role)] / NS for role in Role},
            {role: self._idle_ns[Share(role)] / NS for role in Role},
            self._device_ns[Share.SHIFTING] / NS - loading_s,
            loading_s,
            dict(self._reread),
        )

    def _work_for(self, share: Share | None, change: int, now: int) -> None:
        """One owner more or less works for a share: keep the time in which any does."""
        if share is None:
            return
        if self._busy[share]:
            self._busy_ns[share] += now - self._busy_since[share]
        self._busy[share] += change
        self._busy_since[share] = now

    def _busy_s(self, share: Share, now: int) -> float:
        """Seconds since the last call in which anybody worked for `share`."""
        self._work_for(share, 0, now)
        return self._busy_ns.pop(share, 0) / NS

    def _on_lease(self, event: LeaseMoved) -> None:
        epoch, state = event.lease, event.state
        if state is LeaseState.ACTIVE:
            self._leases[epoch] = _Owner(Share(event.role), event.devices, since=event.t_ns)
        elif state is LeaseState.DRAINING and epoch in self._leases:
            self._account(self._leases[epoch], event.t_ns)
            self._leases[epoch].leaving = True
        elif state in (LeaseState.RELEASED, LeaseState.LOST) and epoch in self._leases:
            owner = self._leases[epoch]
            owner.running, owner.updating = 0, False
            self._account(owner, event.t_ns)
            del self._leases[epoch]  # sequences that leave a lost lease afterwards find nothing to end

    def _on_updating(self, event: LeaseUpdating) -> None:
        self._update(event, True)

    def _on_updated(self, event: LeaseUpdated) -> None:
        self._update(event, False)

    def _update(self, event: LeaseUpdating | LeaseUpdated, updating: bool) -> None:
        owner = self._leases.get(event.lease)
        if owner is not None:
            owner.updating = updating
            self._account(owner, event.t_ns)

    def _on_shift_began(self, event: ShiftBegan) -> None:
        if event.sources:
            self._with_sources.add(event.shift)
        self._shifts[event.shift] = _Owner(Share.SHIFTING, devices_of(event), since=event.t_ns)
        self._phase_began[event.shift] = event.t_ns

    def _on_shift_phase(self, event: ShiftPhase) -> None:
        owner, now = self._shifts[event.shift], event.t_ns
        took = (now - self._phase_began[event.shift]) / NS
        if took > 0 or event.phase is Step.DRAIN:  # other phases take time wherever they apply
            self._phases[event.phase].append(took)
            self._phase_device_s[event.phase] += took * len(owner.devices)
        self._phase_began[event.shift] = now
        if event.phase is Step.DRAIN:
            owner.running = 1
            self._account(owner, now)

    def _on_shift_ended(self, event: ShiftEnded) -> None:
        owner = self._shifts.pop(event.shift)
        owner.running = 0
        self._account(owner, event.t_ns)
        del self._phase_began[event.shift]
        self._failed_shifts += not event.ok
        self._done_shifts += event.ok and event.shift in self._with_sources

    def _on_device_lost(self, event: DeviceLost) -> None:
        self._losses += 1

    # ------------------------------------------------------------------------------- the summary

    def summary(self) -> dict[str, Any]:
        """The run's numbers; the schema is documented in docs/results-format.md."""
        began, makespan_s = self.began, self._last_publish_ns / NS
        policy = sum(step["policy_tokens"] for step in self.steps)
        judge = sum(step["judge_tokens"] for step in self.steps)
        floor = _floor(began.floor)
        at_least = least(self._work, floor)
        phases = {
            phase.value: {"mean_s": _mean(took), "device_s": self._phase_device_s[phase]}
            for phase, took in self._phases.items()
        }
        return {
            "summary_schema": SUMMARY_SCHEMA,
            **{key: getattr(began, key) for key in ("kind_of_numbers", "system", "model", "policy", "judge")},
            **{key: getattr(began, key) for key in ("seed", "gpus", "staleness_bound", "token_scale")},
            "extrapolated": began.extrapolated,
            "oversubscribed": bool(began.oversubscribed),
            "machine": began.machine or NOMINAL_MACHINE,
            "makespan_s": makespan_s,
            "lower_bound_s": at_least.bound_s,
            "weights_sha256": self.ended.weights_sha256 if self.ended else None,
            "migrations": self.migrations,
            "shifts": self._done_shifts,
            "failed_shifts": self._failed_shifts,
            "device_losses": self._losses,
            "shift_phases": phases,
            "tokens_per_s": {
                "policy": _per(policy, makespan_s),
                "judge": _per(judge, makespan_s),
                "total": _per(policy + judge, makespan_s),
                "total_per_gpu": _per(policy + judge, makespan_s * began.gpus),
            },
            "gpu_time_share": self._shares(),
            "efficiency": self._efficiency(makespan_s, at_least.bound_s),
            "loss": loss_of(makespan_s, self._spent_until, floor, at_least),
            "realised_staleness": {
                "max": max(self._staleness, default=0),
                "mean": _mean(self._staleness) or 0.0,
            },
            "cut_off": (cut_off := _whole(self.steps)),
            "warnings": warnings_of(cut_off),
            "step_s_mean": _mean([step["step_s"] for step in self.steps]),
            "steps": self.steps,
        }

    def _efficiency(self, makespan_s: float, bound_s: float) -> dict[str, float | None]:
        """How near the run is to what cannot be beaten: the lower bound, and in its steady part (after the
        first `UNSTEADY` publishes and before the last two) the fluid optimum of divisible shares."""
        steady, steps = self.began.steady or {}, self.steps[UNSTEADY:-2]
        step_s = _mean([step["step_s"] for step in steps])
        optimum = steady.get("divisible_s")
        return {
            "of_bound": _per(bound_s, makespan_s),
            "of_steady_optimum": optimum / step_s if optimum and step_s else None,
        }

    def _shares(self) -> dict[str, float]:
        total = self._last_publish_ns * self.began.gpus
        used = self._published_device_ns
        spent = [share for share in Share if share is not Share.IDLE]
        shares = {share.value: used.get(share, 0.0) / total if total else 0.0 for share in spent}
        return {**shares, Share.IDLE.value: 1.0 - sum(shares.values())}


CUT_OFF = ("responses_truncated", "judgements_truncated", "verdicts_unparsable", "unparsable_truncated")


def _truncated(event: SequenceFinished, cap: int | None) -> bool | None:
    """Was this sequence cut off at its cap? None where nobody knows."""
    if event.end is not None:
        return event.end is End.LENGTH
    return event.tokens >= cap if cap is not None else None


def _cut_off(samples: list[_Sample]) -> dict[str, int | None]:
    """Counts of a step: truncated responses and judgements; judgements without a verdict, and how many of
    these were truncated. None where it is not known."""
    responses = [s.response_truncated for s in samples if s.response_truncated is not None]
    judgements = {sequence: cut for s in samples for sequence, cut in s.truncated.items()}
    unparsable = [sequence for s in samples for sequence in s.unparsable or ()]
    real = any(s.unparsable is not None for s in samples)
    counts = (
        sum(responses) if responses else None,
        sum(judgements.values()) if judgements else None,
        len(unparsable) if real else None,
        sum(judgements.get(sequence, False) for sequence in unparsable) if real else None,
    )
    return dict(zip(CUT_OFF, counts, strict=True))


def _whole(steps: list[dict[str, Any]]) -> dict[str, int | None]:
    """The counts of all steps together, beside the responses and judgements that they are of."""
    total: dict[str, int | None] = {
        key: sum(step[key] for step in steps) for key in ("responses", "judgements")
    }
    for key in CUT_OFF:
        known = [step[key] for step in steps if step[key] is not None]
        total[key] = sum(known) if known else None
    return total


def warnings_of(cut_off: Mapping[str, int | None]) -> list[str]:
    """What a reader of the rewards and of the throughput must be told, a line each."""
    found = []
    for key, of, text in (
        ("responses_truncated", "responses", "responses were cut off at their cap"),
        ("judgements_truncated", "judgements", "judgements were cut off at their cap"),
        ("verdicts_unparsable", "judgements", "judgements gave no verdict that can be parsed"),
    ):
        count, total = cut_off.get(key), cut_off.get(of)
        if count and total and count > WORTH_A_WARNING * total:
            line = f"{count / total:.1%} of {total} {text}"
            if key == "verdicts_unparsable":
                line += f" ({cut_off['unparsable_truncated']} of them were cut off), which is worth 0"
            found.append(line)
    return found


def _floor(raw: dict[str, Any]) -> Floor:
    """A run's floor from its first event. Schema 1 knew no price of reading."""

    def role_of(floor: dict[str, Any]) -> ServingFloor:
        before = floor.get("token_device_s")
        known = [{"generated": before, "read": 0.0}] if before is not None else floor["prices"]
        prices = [Price(**price) for price in known]
        kept = {name: value for name, value in floor.items() if name not in ("token_device_s", "prices")}
        return ServingFloor(prices=tuple(prices), **kept)

    return Floor(**{**raw, "serving": {role: role_of(raw["serving"][role]) for role in SERVING}})


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_stats(stats: tuple[dict[str, float], ...]) -> dict[str, float]:
    names = stats[0] if stats else {}
    return {name: sum(one[name] for one in stats) / len(stats) for name in names}


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0

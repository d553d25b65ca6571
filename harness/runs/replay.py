"""A recorded run again: do its decisions come out the same, and does the simulator predict its times?

(a) Every decision's view and memory, as they were logged, are given to the policy once more. A policy is a
    pure function of them, so its plan must be the logged one, on whatever backend the run was.
(b) The run's own lengths go through the simulated cluster. For a simulated or co-simulated run that is the
    run itself. For a live one the durations come from its calibration, and the difference is the
    simulator's error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from harness.errors import UsageError
from harness.results.log import Told, reading
from harness.results.record import RunDirectory
from harness.results.summary import Tally
from harness.runs.assemble import assemble, check_request
from harness.runs.live_costs import Calibration
from harness.runs.runner import simulate
from harness.runs.spec import RunSpec
from systems.events import EVENT_SCHEMA, Decision, Event, SequenceFinished, SequencesDispatched
from systems.policies import policy_of
from systems.types import Estimates, Kind, View
from workloads.recorded import RecordedWorkload


@dataclass(frozen=True)
class Replay:
    """What came out. Times are seconds, by RL step; `differing` are the moments of other plans."""

    run: str
    unverified: str | None
    kind: Kind
    decisions: int
    differing: tuple[float, ...]
    recorded_s: tuple[float, ...]
    simulated_s: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Signed, relative to the recorded step."""
        pairs = zip(self.simulated_s, self.recorded_s, strict=True)
        return tuple(simulated / recorded - 1 for simulated, recorded in pairs)

    @property
    def makespan_error(self) -> float:
        return sum(self.simulated_s) / sum(self.recorded_s) - 1

    def to_json(self) -> dict[str, Any]:
        steps = zip(self.recorded_s, self.simulated_s, self.errors, strict=True)
        return {
            "run": self.run,
            **({"unverified": self.unverified} if self.unverified else {}),
            "kind": self.kind,
            "decisions": self.decisions,
            "differing": list(self.differing),
            "makespan_error": self.makespan_error,
            "mean_absolute_step_error": sum(map(abs, self.errors)) / len(self.errors),
            "steps": [dict(zip(("recorded_s", "simulated_s", "error"), step, strict=True)) for step in steps],
        }


def replay(directory: RunDirectory, calibration: Calibration | None = None) -> Replay:
    """Raises `UsageError` if the run is not complete. `calibration` replaces the run's own."""
    if directory.status != "complete":
        raise UsageError(f"{directory.id} {directory.said}; only a complete run is replayed")
    spec = RunSpec.from_json(directory.manifest["spec"])
    directory.check()
    schema = directory.manifest.get("event_schema", 1)
    if schema != EVENT_SCHEMA:
        raise UsageError(
            f"{directory.id}: its events have schema {schema}, and what a policy was shown then is not what "
            f"it is shown now (schema {EVENT_SCHEMA}): it can be shown and compared, and replayed with the "
            "code that made it"
        )
    with reading(directory.events_path) as lines:
        events = list(lines)
        recorded = tallied(events)
    decisions, differing = again(spec, events)
    if calibration is not None:
        spec = spec.model_copy(update={"calibration": calibration})
    simulated = tallied(simulate_again(spec, events))
    return Replay(
        directory.id,
        directory.unverified,
        spec.kind,
        decisions,
        differing,
        tuple(step["step_s"] for step in recorded.steps),
        tuple(step["step_s"] for step in simulated.steps),
    )


def tallied(events: Iterable[Event]) -> Tally:
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally


# ------------------------------------------------------------------------------- decisions


def again(spec: RunSpec, events: Iterable[Event]) -> tuple[int, tuple[float, ...]]:
    """How many decisions were made, and when (seconds) the policy now decides otherwise."""
    policy = policy_of(spec.policy, spec.planner)
    _, layout, recipe = check_request(spec)
    first = policy.begin(layout)
    decisions, differing = 0, []
    for event in events:
        if isinstance(event, Decision):
            decisions += 1
            view = View.from_record(event.view, layout, recipe)
            plan, _ = policy.plan(view, remembered(first, event.memory))
            if (plan.placements, plan.how, plan.why) != (event.placements, event.how, event.why):
                differing.append(event.t_ns / 1e9)
    return decisions, tuple(differing)


def remembered(like: Any, raw: Mapping[str, Any]) -> Any:
    """A memory from its record. What it contains has the types of `like`, the memory that it began as."""
    hints, found = get_type_hints(type(like)), {}
    for one in fields(like):
        began_as = getattr(like, one.name)
        if is_dataclass(began_as):
            found[one.name] = remembered(began_as, raw[one.name])
        else:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[one.name])
            found[one.name] = adapter.validate_python(raw[one.name])
    return type(like)(**found)


# ------------------------------------------------------------------------------- times


def simulate_again(spec: RunSpec, events: list[Event]) -> list[Event]:
    """The events of the same run on the simulated cluster, with the recorded lengths."""
    parts = assemble(spec, _recorded(spec, events), _prior(spec, events))
    found: list[Event] = []
    simulate(spec, parts, Told(found.append))
    return found


def _prior(spec: RunSpec, events: Iterable[Event]) -> Estimates | None:
    """What the planner really started from; for live runs, what their calibration says."""
    first = next((event for event in events if isinstance(event, Decision)), None)
    if spec.calibration is not None or first is None:
        return None
    return Estimates.from_record(first.view["estimates"])


def _recorded(spec: RunSpec, events: Iterable[Event]) -> RecordedWorkload:
    prompts: dict[int, int] = {}
    generated: dict[int, int] = {}
    for event in events:
        if isinstance(event, SequencesDispatched):
            columns = event.sequences, event.context_tokens, event.resumed_tokens
            for sequence, context, resumed in zip(*columns, strict=True):
                prompts[sequence] = context - resumed
        elif isinstance(event, SequenceFinished):
            generated[event.sequence] = event.tokens
    recipe = spec.group.workload
    return RecordedWorkload(prompts, generated, recipe.samples, recipe.judge_calls)

"""From a spec to the parts of a run: layout, cost model, backend, workload, recipe."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from harness.errors import UsageError
from harness.runs.backends import LIVE, SIM, Learned, Request, recorded
from harness.runs.costs import cost_of
from harness.runs.estimates import floor_of, prior_of
from harness.runs.layout import layout_of
from harness.runs.spec import RunSpec
from systems.backends.base import Backend
from systems.backends.faults import Fault, FaultyBackend
from systems.costs.bounds import Floor
from systems.costs.durations import ClusterDurations
from systems.pipeline import Workload
from systems.serving import Deadlines
from systems.types import (
    SERVING,
    Estimates,
    Handover,
    How,
    Layout,
    Placement,
    Publishing,
    Recipe,
    Role,
    Shift,
    Step,
)
from workloads.groups import ModelGroup, architecture_of, real_positions
from workloads.hops import task
from workloads.recorded import RecordedWorkload

MOST_SEQUENCES = 1 << 20  # of an RL step: more would fill this machine's memory


@dataclass(frozen=True)
class Parts:
    """Everything a run is assembled from."""

    layout: Layout
    recipe: Recipe
    cost: ClusterDurations
    backend: Backend
    workload: Workload
    prior: Estimates
    floor: Floor
    deadlines: Deadlines
    learned: Learned | None = None


def assemble(spec: RunSpec, again: RecordedWorkload | None = None, prior: Estimates | None = None) -> Parts:
    """The parts of a run; raises `UsageError` or `UnfitError` before anything has started.

    With the recorded lengths of a finished run it is that run `again`, on the simulated cluster. `prior`
    replaces what the planner would be told in advance.
    """
    cost, layout, recipe = check_request(spec)
    if again is None:
        asked = Request(spec.group, spec.seed, recipe, cost, spec.trace)
        backend, workload, learned = spec.on.build(asked)
    else:
        backend, workload, learned = recorded(again, cost, len(layout.devices))
    if spec.group.faults.losses and not (again and spec.on.measured):
        backend = FaultyBackend(backend, draw_losses(spec, layout))
    prior = prior or prior_of(spec, cost, recipe)
    deadlines = Deadlines(sequence_s=longest_sequence_s(spec, cost))
    return Parts(layout, recipe, cost, backend, workload, prior, floor_of(cost, spec), deadlines, learned)


def check_request(spec: RunSpec) -> tuple[ClusterDurations, Layout, Recipe]:
    """Can this run start? Raises `UsageError` with the numbers; loads no weights."""
    cost = cost_of(spec.group, spec.on.real, spec.calibration, spec.machine)
    layout = layout_of(spec.group, cost.training.smallest_unit, spec.policy.time_shares)
    recipe = recipe_of(spec.group, spec.steps, spec.staleness)
    if spec.on.measured:  # live workers keep no cache for each other
        recipe = replace(recipe, handover=Handover.REREAD)
    if recipe.publishing is Publishing.IN_FLIGHT and spec.on.real and not spec.on.measured:
        raise UsageError(
            "workload.publishing=in-flight: co-simulation writes a version's text at once, without a cache; "
            f"give --backend {LIVE.name} or {SIM.name}"
        )
    if spec.calibration is None:
        check_divides(spec.group)
    check_fits(spec, cost)
    check_positions(spec.group)
    if spec.on.real and not spec.group.workload.judge_calls:
        raise UsageError(
            "workload.judge_calls=0: a run with real text learns from its judge; without one it runs with "
            f"--backend {SIM.name}"
        )
    check_in_time(spec, cost, layout, recipe)
    return cost, layout, recipe


def longest_sequence_s(spec: RunSpec, cost: ClusterDurations) -> float:
    """Seconds of the longest possible sequence of either role, in the fullest batch that there can be."""
    slowest = 0.0
    for role, tokens in longest_context(spec).items():
        serving = cost.serving[role]
        running = serving.bounds().max_running
        held = min(running * tokens, serving.kv_capacity_tokens)
        itl_s = serving.token_s(running) + serving.kv_s(running) * held
        slowest = max(slowest, tokens * itl_s + running * serving.prefill_s(tokens))
    return slowest


def recipe_of(group: ModelGroup, steps: int, staleness: int) -> Recipe:
    workload = group.workload
    if workload.prompts % workload.mini_batches:
        raise UsageError(
            f"workload.mini_batches={workload.mini_batches} does not divide {workload.prompts} prompts"
        )
    sequences = workload.prompts * workload.samples * (1 + workload.judge_calls)
    if sequences > MOST_SEQUENCES:
        raise UsageError(
            f"workload: {workload.prompts} prompts x {workload.samples} samples with {workload.judge_calls} "
            f"judge call(s) are {sequences} sequences a step; at most {MOST_SEQUENCES} are handled"
        )
    default = Publishing.INTERRUPT if staleness else Publishing.DRAIN
    return Recipe(
        steps=steps,
        prompts=workload.prompts,
        samples=workload.samples,
        mini_batches=workload.mini_batches,
        micro_batch_samples=workload.micro_batch_samples,
        judge_calls=workload.judge_calls,
        staleness=staleness,
        publishing=workload.publishing or default,
        handover=workload.handover,
        router=workload.router,
    )


def longest_context(spec: RunSpec) -> dict[Role, int]:
    """Most tokens that a sequence of each role can hold, in the run's own tokens."""
    group = spec.group
    if spec.on.real:
        prompt, response = 128, group.learning.max_new_tokens
        judged = group.learning.judge_max_new_tokens
    else:
        prompt, response, judged = 1024, group.lengths.response_cap, group.lengths.judge_cap
        if spec.trace is not None:
            prompt, response = max(spec.trace.inputs), max(spec.trace.outputs)
    return {Role.ROLLOUT: prompt + response, Role.REWARD: prompt + response + judged}


def check_divides(group: ModelGroup) -> None:
    """Tensor parallelism cuts whole heads and whole columns."""
    pair = group.pair
    for which, name, tp in (("policy", pair.policy, pair.policy_tp), ("judge", pair.judge, pair.judge_tp)):
        if which == "judge" and not group.workload.judge_calls:
            continue
        if tp > group.cluster.gpus_per_node:
            raise UsageError(
                f"pair.{which}_tp={tp} is more than the {group.cluster.gpus_per_node} devices of a node, and "
                "only NVLink within one is modelled"
            )
        model = architecture_of(group, name)
        widths = {"attention heads": model.heads, "vocabulary": model.vocab, "feed-forward": model.ffn}
        widths["expert width"] = model.expert_ffn
        for what, width in widths.items():
            if width % tp:
                raise UsageError(f"pair.{which}_tp={tp} does not divide the {width} {what} of {name}")
        if model.kv_heads % tp and tp % model.kv_heads:
            raise UsageError(f"pair.{which}_tp={tp} does not divide the {model.kv_heads} KV heads of {name}")


def check_fits(spec: RunSpec, cost: ClusterDurations) -> None:
    """Every replica must hold its weights and one sequence of the longest kind."""
    longest = longest_context(spec)
    for role in SERVING:
        serving = cost.serving[role]
        if role is Role.REWARD and not spec.group.workload.judge_calls:
            continue
        if serving.kv_capacity_tokens < longest[role]:
            raise UsageError(
                f"{serving.label}: "
                f"{max(0, serving.kv_capacity_tokens)} context tokens fit beside the weights, the "
                f"longest {role} sequence has {longest[role]}; use a wider replica"
            )


def check_positions(group: ModelGroup) -> None:
    """Real models read and write no further than the positions that they were made with."""
    if group.real is None:
        return
    learning, prompt = group.learning, task.LONGEST_PROMPT
    judged = prompt + learning.max_new_tokens + len(task.JUDGE_MARK)
    for key, model, longest in (
        ("max_new_tokens", group.real.policy, prompt + learning.max_new_tokens),
        ("judge_max_new_tokens", group.real.judge, judged + learning.judge_max_new_tokens),
    ):
        limit = real_positions(model)
        if longest > limit:
            given = getattr(learning, key)
            raise UsageError(
                f"learning.{key}={given}: the longest sequence would have {longest} tokens, and {model} has "
                f"{limit} positions; at most {given - (longest - limit)} fit"
            )


def check_in_time(spec: RunSpec, cost: ClusterDurations, layout: Layout, recipe: Recipe) -> None:
    """A shift, a publish or a micro-batch that takes longer than its deadline counts as lost, every time."""
    deadlines = Deadlines()
    for role in Role:
        devices = max(layout.width[role], layout.train_min if role is Role.TRAIN else 1)
        shift_s = _slowest_shift_s(cost, role, devices)
        if shift_s > deadlines.reply_s:
            raise UsageError(
                f"costs: a shift to {role} would take {shift_s:.0f} s, and one of more than "
                f"{deadlines.reply_s:.0f} s counts as lost"
            )
    if cost.update_s() > deadlines.reply_s:
        raise UsageError(
            f"costs: loading a version would take {cost.update_s():.0f} s, and more than "
            f"{deadlines.reply_s:.0f} s counts as lost"
        )
    per_mini = -(-recipe.prompts // recipe.mini_batches) * recipe.samples
    samples, length = min(recipe.micro_batch_samples, per_mini), longest_context(spec)[Role.ROLLOUT]
    smallest = min(layout.train_min, len(layout.devices))
    micro_s = cost.training.micro_s(samples * length, samples * length * (length + 1) / 2, smallest)
    if micro_s > deadlines.train_s:
        raise UsageError(
            f"workload.micro_batch_samples={recipe.micro_batch_samples}: a micro-batch of the longest "
            f"sequences would take {micro_s:.0f} s on {smallest} device(s), and more than "
            f"{deadlines.train_s:.0f} s counts as lost"
        )


def _slowest_shift_s(cost: ClusterDurations, role: Role, devices: int) -> float:
    """Seconds of a shift between two places of a role, while all of a node copies."""
    here, there = Placement(role, tuple(range(devices))), Placement(role, tuple(range(devices, 2 * devices)))
    shift, total = Shift(0, (here,), (there,), How.MIGRATE), 0.0
    for step in (Step.PARK, Step.RELEASE, Step.LOAD, Step.WARM, Step.READY):
        seconds, moved = cost.phase(step, shift)
        total += seconds + cost.copy_s(moved, cost.gpus_per_node)
    return total


def draw_losses(spec: RunSpec, layout: Layout) -> tuple[Fault, ...]:
    rng = random.Random(f"{spec.seed}/faults")
    faults = spec.group.faults
    drawn = [
        Fault(rng.uniform(0, faults.within_s), rng.choice(layout.devices).id) for _ in range(faults.losses)
    ]
    return tuple(sorted(drawn))

"""From a spec to the parts of a run: layout, cost model, backend, workload, recipe."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.costs import cost_of, floor_of, prior_of
from harness.errors import UsageError
from harness.layout import layout_of
from harness.spec import RunSpec
from systems.backends.base import Backend
from systems.backends.faults import Fault, FaultyBackend
from systems.backends.sim.backend import SimBackend
from systems.backends.sim.durations import ClusterDurations
from systems.backends.sim.lengths import DrawnLengths
from systems.backends.sim.training import CountingLearner
from systems.bounds import Floor
from systems.pipeline import Workload
from systems.policies import SYSTEMS
from systems.types import SERVING, Estimates, Layout, Publishing, Recipe, Role
from workloads.groups import ModelGroup, architecture_of
from workloads.synthetic import SyntheticWorkload


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
    learned: Learned | None = None


class Learned(Protocol):
    """What a run with real weights has learned."""

    def weights_sha256(self) -> str: ...

    def save(self, directory: Path) -> None: ...


def build(spec: RunSpec) -> Parts:
    """Assemble a run; raises `UsageError` or `UnfitError` before anything has started."""
    cost, layout, recipe = check_request(spec)
    backend, workload, learned = BUILDERS[spec.backend](spec, cost, recipe)
    if spec.group.faults.losses:
        backend = FaultyBackend(backend, draw_losses(spec, layout))
    prior, floor = prior_of(spec, cost, recipe), floor_of(cost, spec)
    return Parts(layout, recipe, cost, backend, workload, prior, floor, learned)


def check_request(spec: RunSpec) -> tuple[ClusterDurations, Layout, Recipe]:
    """Can this run start? Raises `UsageError` with the numbers; loads no weights."""
    cost = cost_of(spec)
    layout = layout_of(spec.group, cost.training.smallest_unit, SYSTEMS[spec.system].time_shares)
    recipe = recipe_of(spec.group, spec.steps, spec.staleness)
    if spec.calibration is None:
        check_divides(spec.group)
    check_fits(spec, cost)
    return cost, layout, recipe


Built = tuple[Backend, Workload, Learned | None]


def _simulated(spec: RunSpec, cost: ClusterDurations, recipe: Recipe) -> Built:
    workload = SyntheticWorkload(
        spec.group.lengths, spec.seed, recipe.samples, recipe.judge_calls, recipe.prompts, spec.trace
    )
    return SimBackend(spec.kind, cost, DrawnLengths(workload), CountingLearner()), workload, None


def _cosimulated(spec: RunSpec, cost: ClusterDurations, recipe: Recipe) -> Built:
    from harness.real import cosimulated  # torch is loaded only where it is used

    return cosimulated(spec, cost, recipe)


def _live(spec: RunSpec, cost: ClusterDurations, recipe: Recipe) -> Built:
    from harness.real import live

    return live(spec.group, spec.seed)


BUILDERS: dict[str, Callable[[RunSpec, ClusterDurations, Recipe], Built]] = {
    "sim": _simulated,
    "cosim": _cosimulated,
    "live": _live,
}


def recipe_of(group: ModelGroup, steps: int, staleness: int) -> Recipe:
    workload = group.workload
    if workload.prompts % workload.mini_batches:
        raise UsageError(
            f"workload.mini_batches={workload.mini_batches} does not divide {workload.prompts} prompts"
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
    )


def longest_context(spec: RunSpec) -> dict[Role, int]:
    """Most tokens that a sequence of each role can hold, in the run's own tokens."""
    group = spec.group
    if spec.backend != "sim":
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
        if serving.kv_capacity_tokens < longest[role]:
            raise UsageError(
                f"{serving.label}: "
                f"{max(0, serving.kv_capacity_tokens)} context tokens fit beside the weights, the "
                f"longest {role} sequence has {longest[role]}; use a wider replica"
            )


def draw_losses(spec: RunSpec, layout: Layout) -> tuple[Fault, ...]:
    rng = random.Random(f"{spec.seed}/faults")
    faults = spec.group.faults
    drawn = [
        Fault(rng.uniform(0, faults.within_s), rng.choice(layout.devices).id) for _ in range(faults.losses)
    ]
    return tuple(sorted(drawn))

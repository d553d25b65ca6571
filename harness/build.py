"""From a spec to the parts of a run: layout, cost model, backend, workload, recipe."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.errors import UnfitError, UsageError
from harness.spec import RunSpec
from systems.backends.base import Backend
from systems.backends.faults import Fault, FaultyBackend
from systems.backends.sim.backend import SimBackend
from systems.backends.sim.cost import ClusterCost, cluster_cost, load_hardware
from systems.backends.sim.lengths import DrawnLengths
from systems.backends.sim.training import CountingLearner
from systems.bounds import Floor, ServingFloor
from systems.pipeline import Workload
from systems.types import SERVING, Device, Estimates, Layout, Publishing, Recipe, Role
from workloads.groups import ModelGroup, architecture
from workloads.synthetic import LengthPrior, SyntheticWorkload, length_priors


@dataclass(frozen=True)
class Parts:
    """Everything a run is assembled from."""

    layout: Layout
    recipe: Recipe
    cost: ClusterCost
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
    real = spec.backend != "sim"
    cost = cost_of(spec.group, real)
    layout = layout_of(spec.group, cost)
    recipe = recipe_of(spec)
    check_fits(spec.group, cost, real)
    learned: Learned | None = None
    workload: Workload
    backend: Backend
    if spec.backend == "sim":
        synthetic = SyntheticWorkload(spec.group.lengths, spec.seed, recipe.samples, recipe.judge_calls)
        workload = synthetic
        backend = SimBackend(spec.kind, cost, DrawnLengths(synthetic), CountingLearner())
    elif spec.backend == "cosim":
        from harness.real import cosimulated  # torch is loaded only where it is used

        backend, workload, learned = cosimulated(spec, cost, recipe)
    else:
        raise UnfitError(f"--backend {spec.backend}: this backend is not part of this version")
    if spec.group.faults.losses:
        backend = FaultyBackend(backend, draw_losses(spec, layout))
    prior, floor = prior_of(spec.group, cost, recipe, real), floor_of(cost, spec)
    return Parts(layout, recipe, cost, backend, workload, prior, floor, learned)


def cost_of(group: ModelGroup, real: bool) -> ClusterCost:
    """The cost model; only a real model's tokens stand for several of the pair's."""
    return cluster_cost(
        architecture(group.pair.policy),
        architecture(group.pair.judge),
        load_hardware(group.cluster.hardware),
        policy_tp=group.pair.policy_tp,
        judge_tp=group.pair.judge_tp,
        max_running=group.cluster.max_running,
        token_scale=group.cluster.token_scale if real else 1,
    )


def layout_of(group: ModelGroup, cost: ClusterCost) -> Layout:
    cluster = group.cluster
    layout = Layout(
        devices=tuple(Device(i, i // cluster.gpus_per_node, cluster.hardware) for i in range(cluster.gpus)),
        width={Role.ROLLOUT: group.pair.policy_tp, Role.REWARD: group.pair.judge_tp, Role.TRAIN: 1},
        template={Role.TRAIN: cluster.train, Role.ROLLOUT: cluster.rollout, Role.REWARD: cluster.reward},
        train_min=cost.training.smallest_unit,
    )
    total = sum(layout.template.values())
    needed = smallest_cluster(group, cost)
    if total != cluster.gpus and cluster.gpus >= needed and total < cluster.gpus:
        raise UsageError(
            f"cluster.gpus={cluster.gpus}: the split train {cluster.train}, rollout {cluster.rollout}, "
            f"reward {cluster.reward} adds up to {total}; --gpus N scales all of them"
        )
    if cluster.gpus < needed or total > cluster.gpus:
        raise UsageError(
            f"cluster.gpus={cluster.gpus}: the layout needs "
            f"{max(needed, total)} (train {max(cluster.train, layout.train_min)}, rollout "
            f"{cluster.rollout}, reward {cluster.reward})"
        )
    for role, devices in layout.template.items():
        if devices % layout.block or devices == 0:
            raise UsageError(
                f"cluster.{role}={devices}: must be a positive multiple of {layout.block} devices, the "
                "widest replica"
            )
    if layout.template[Role.TRAIN] < layout.train_min:
        raise UsageError(
            f"cluster.train={cluster.train}: the training state of {group.pair.policy} needs "
            f"{layout.train_min} devices"
        )
    return layout


def smallest_cluster(group: ModelGroup, cost: ClusterCost) -> int:
    """Devices that the three roles need side by side."""
    block = max(group.pair.policy_tp, group.pair.judge_tp)
    return (math.ceil(cost.training.smallest_unit / block) + 2) * block


def scaled_split(group: ModelGroup, gpus: int) -> dict[str, int]:
    """The template split on another number of devices, in whole blocks, no role left without one."""
    cost = cost_of(group, real=False)
    block = max(group.pair.policy_tp, group.pair.judge_tp)
    needed = smallest_cluster(group, cost)
    if gpus < needed:
        raise UsageError(
            f"--gpus {gpus}: {group.name} needs at least {needed} (train "
            f"{needed - 2 * block}, rollout {block}, reward {block})"
        )
    if gpus % block:
        below = gpus - gpus % block
        raise UsageError(f"--gpus {gpus}: must be a multiple of {block}; nearest: {below} or {below + block}")
    least = {"train": math.ceil(cost.training.smallest_unit / block), "rollout": 1, "reward": 1}
    share = {role: getattr(group.cluster, role) / group.cluster.gpus * gpus / block for role in least}
    split = {role: max(least[role], math.floor(share[role])) for role in least}
    while sum(split.values()) < gpus // block:
        split[max(split, key=lambda role: share[role] - split[role])] += 1
    while sum(split.values()) > gpus // block:
        donors = [role for role in split if split[role] > least[role]]
        split[max(donors, key=lambda role: split[role] - share[role])] -= 1
    return {role: blocks * block for role, blocks in split.items()}


def recipe_of(spec: RunSpec) -> Recipe:
    workload = spec.group.workload
    if workload.prompts % workload.mini_batches:
        raise UsageError(
            f"workload.mini_batches={workload.mini_batches} does not divide {workload.prompts} prompts"
        )
    default = Publishing.INTERRUPT if spec.staleness else Publishing.DRAIN
    return Recipe(
        steps=spec.steps,
        prompts=workload.prompts,
        samples=workload.samples,
        mini_batches=workload.mini_batches,
        micro_batch_samples=workload.micro_batch_samples,
        judge_calls=workload.judge_calls,
        staleness=spec.staleness,
        publishing=workload.publishing or default,
    )


def longest_context(group: ModelGroup, real: bool) -> dict[Role, int]:
    """Most tokens that a sequence of each role can hold, in the run's own tokens."""
    if real:
        prompt, response = 128, group.learning.max_new_tokens
        judged = group.learning.judge_max_new_tokens
    else:
        prompt, response, judged = 1024, group.lengths.response_cap, group.lengths.judge_cap
    return {Role.ROLLOUT: prompt + response, Role.REWARD: prompt + response + judged}


def check_fits(group: ModelGroup, cost: ClusterCost, real: bool) -> None:
    """Every replica must hold its weights and one sequence of the longest kind."""
    longest = longest_context(group, real)
    for role in SERVING:
        serving = cost.serving[role]
        if serving.kv_capacity_tokens < longest[role]:
            raise UsageError(
                f"{serving.architecture.name} on {serving.tp} x {serving.hardware.name}: "
                f"{max(0, serving.kv_capacity_tokens)} context tokens fit beside the weights, the "
                f"longest {role} sequence has {longest[role]}; use a wider replica"
            )


def prior_of(group: ModelGroup, cost: ClusterCost, recipe: Recipe, real: bool) -> Estimates:
    """What the planner may know before the first step: declared priors and the cost model."""
    if real:
        # the warm-started models' lengths, rounded (workloads/hops/models/EVIDENCE.txt)
        priors = {Role.ROLLOUT: LengthPrior(15.0, 1.5), Role.REWARD: LengthPrior(35.0, 0.9)}
        prompt = 25.0
    else:
        priors = length_priors(group.lengths)
        prompt = group.lengths.prompt_mean
    means = {role: priors[role].mean for role in SERVING}
    prompts = {Role.ROLLOUT: prompt, Role.REWARD: prompt + means[Role.ROLLOUT]}
    batch = recipe.prompts * recipe.samples
    tokens = batch * (prompts[Role.ROLLOUT] + means[Role.ROLLOUT])
    return Estimates(
        speed={role: cost.serving[role].speed() for role in SERVING},
        length_mean=means,
        length_cv={role: priors[role].cv for role in SERVING},
        prompt_mean=prompts,
        train_device_s=cost.training.device_s(round(tokens)),
        shift_s=cost.warm_shift_s(),
        reprefill_s=cost.serving[Role.ROLLOUT].prefill_s(round(prompts[Role.ROLLOUT] + means[Role.ROLLOUT])),
    )


def floor_of(cost: ClusterCost, spec: RunSpec) -> Floor:
    """The cheapest way to do everything, for the lower bound."""
    serving = {}
    for role in SERVING:
        one = cost.serving[role]
        best = min(one.alpha_s(n) / n for n in range(1, one.max_running + 1))
        serving[role] = ServingFloor(
            token_device_s=one.tp * best,
            kv_device_s=one.tp * one.beta_s,
            token_s=one.alpha_s(1),
            kv_s=one.beta_s,
        )
    gpus = spec.group.cluster.gpus
    return Floor(
        devices=gpus,
        serving=serving,
        train_token_device_s=cost.training.device_s(1),
        train_step_s=spec.group.workload.mini_batches * cost.training.optimizer_s + cost.publish_s(gpus),
    )


def draw_losses(spec: RunSpec, layout: Layout) -> tuple[Fault, ...]:
    rng = random.Random(f"{spec.seed}/faults")
    faults = spec.group.faults
    drawn = [
        Fault(rng.uniform(0, faults.within_s), rng.choice(layout.devices).id) for _ in range(faults.losses)
    ]
    return tuple(sorted(drawn))

"""What is known of a run in advance: a planner's estimates before the first step, and a floor."""

from __future__ import annotations

from statistics import fmean

from harness.runs.spec import RunSpec
from systems.costs.bounds import Floor, Price, ServingFloor
from systems.costs.durations import ClusterDurations
from systems.types import SERVING, Estimates, Recipe, Role
from workloads.synthetic import length_priors, lognormal


def prior_of(spec: RunSpec, cost: ClusterDurations, recipe: Recipe) -> Estimates:
    """What the planner may know before the first step: declared priors and the cost model."""
    group = spec.group
    if spec.on.real:
        # the warm-started models' lengths, rounded (workloads/hops/models/EVIDENCE.txt)
        priors = {Role.ROLLOUT: lognormal(15.0, 1.5), Role.REWARD: lognormal(35.0, 0.9)}
        prompt = 25.0
    else:
        priors = length_priors(group.lengths, spec.trace)
        prompt = fmean(spec.trace.inputs) if spec.trace else group.lengths.prompt_mean
    means = {role: priors[role].mean for role in SERVING}
    prompts = {Role.ROLLOUT: prompt, Role.REWARD: prompt + means[Role.ROLLOUT]}
    batch = recipe.prompts * recipe.samples
    length = prompts[Role.ROLLOUT] + means[Role.ROLLOUT]
    pairs = (length**2 + (priors[Role.ROLLOUT].cv * means[Role.ROLLOUT]) ** 2) / 2
    gpus, optimizer = spec.group.cluster.gpus, recipe.mini_batches
    return Estimates(
        speed={role: cost.serving[role].speed() for role in SERVING},
        length_mean=means,
        length_cv={role: priors[role].cv for role in SERVING},
        prompt_mean=prompts,
        length_quantiles={role: priors[role].quantiles for role in SERVING},
        train_device_s=cost.training.device_s(round(batch * length), batch * pairs),
        train_fixed_s=optimizer * cost.training.step_s(gpus) + cost.publish_s(gpus),
        shift_s=cost.warm_shift_s(),
        reprefill_s={
            role: cost.serving[role].prefill_s(round(prompts[role] + means[role] / 2)) for role in SERVING
        },
    )


def floor_of(cost: ClusterDurations, spec: RunSpec) -> Floor:
    """The cheapest way to do everything, for the lower bound."""
    serving = {}
    for role in SERVING:
        one = cost.serving[role]
        prices = one.prices()
        batches = range(1, one.max_running + 1)
        least_kv_s = min(map(one.kv_s, batches))
        serving[role] = ServingFloor(
            prices=tuple(Price(one.devices * made, one.devices * read) for made, read in prices),
            kv_device_s=one.devices * least_kv_s,
            token_s=min(map(one.token_s, batches)),
            kv_s=least_kv_s,
            read_s=max(read for _, read in prices),
        )
    gpus = spec.group.cluster.gpus
    return Floor(
        devices=gpus,
        serving=serving,
        train_token_device_s=cost.training.token_device_s,
        train_pair_device_s=cost.training.device_s(0, 1.0) - cost.training.device_s(0, 0.0),
        train_step_s=spec.group.workload.mini_batches * cost.training.step_s(gpus) + cost.publish_s(gpus),
    )

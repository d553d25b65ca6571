"""The parts of a run that are real: tiny models that generate, judge and learn. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import workloads
from harness.errors import UnfitError
from systems.backends.sim.backend import SimBackend
from systems.costs.durations import ClusterDurations
from systems.types import Kind, Recipe, Role
from workloads.groups import ModelGroup
from workloads.hops import task
from workloads.hops.workload import HopsWorkload, judge_tokens

try:
    import torch
    from torch import Tensor

    from systems.backends.cosim.lengths import EngineLengths, PolicyVersions, Serving
    from systems.backends.live.backend import LiveBackend
    from systems.backends.live.cluster import LocalCluster
    from systems.backends.live.roles import Generation, Learning
    from systems.learning.grpo import GrpoConfig
    from systems.learning.trainer import GrpoLearner
    from systems.model.config import ModelConfig
    from systems.model.qwen3 import Qwen3
    from systems.model.sampling import Sampler
    from systems.model.serving import ServingModel
    from systems.model.weights import (
        digest,
        load_model,
        save_standard,
        to_standard,
    )
except ModuleNotFoundError as error:
    raise UnfitError(
        f"a run with real models needs '{error.name}': pip install 'pivot-bench[live]', or use --backend sim"
    ) from None

PACKAGE = Path(workloads.__file__).parent


class LearnedPolicy:
    """The weights that a run ends with."""

    def __init__(self, config: ModelConfig, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._config = config
        self._weights = weights

    def weights_sha256(self) -> str:
        return digest(self._weights())

    def save(self, directory: Path) -> None:
        save_standard(self._config, self._weights(), directory)


def cosimulated(
    group: ModelGroup, seed: int, cost: ClusterDurations, recipe: Recipe
) -> tuple[SimBackend, HopsWorkload, LearnedPolicy]:
    """Real tokens, verdicts and gradients; durations from the cost model."""
    # The bits do not depend on it. A second thread gains a fifth on an idle machine, and loses far more
    # on a busy one, where tiny operators wait for a core that somebody else has.
    torch.set_num_threads(1)
    learner, lengths = learner_and_lengths(group, recipe.staleness, seed)
    backend = SimBackend(Kind.COSIMULATED, cost, lengths, learner, group.cluster.gpus)
    learned = LearnedPolicy(learner.model.config, lambda: to_standard(learner.model))
    return backend, HopsWorkload(seed), learned


def live(group: ModelGroup, seed: int) -> tuple[LiveBackend, HopsWorkload, LearnedPolicy]:
    """Real workers, processes of this machine."""
    policy, judge = models_of(group)
    max_running, learning = group.live.max_running, group.learning
    generation = {
        role: Generation(model.config, sampler, task.STOP, max_new, max_running)
        for role, model, sampler, max_new in (
            (Role.ROLLOUT, policy, policy_sampler(group, seed), learning.max_new_tokens),
            (Role.REWARD, judge, JUDGE_SAMPLER, learning.judge_max_new_tokens),
        )
    }
    backend = LiveBackend(
        LocalCluster(range(group.cluster.gpus)), policy, judge, generation,
        Learning(policy.config, grpo_config(group), task.VOCAB),
    )  # fmt: skip
    return backend, HopsWorkload(seed), LearnedPolicy(policy.config, backend.weights)


JUDGE_SAMPLER = Sampler(task.VOCAB, 0.0)


def policy_sampler(group: ModelGroup, seed: int) -> Sampler:
    return Sampler(task.VOCAB, group.learning.temperature, seed)


def models_of(group: ModelGroup) -> tuple[Qwen3, Qwen3]:
    """The real policy and judge of a group."""
    if group.real is None:
        raise UnfitError(f"{group.name} has no real weights here")
    return load_model(PACKAGE / group.real.policy), load_model(PACKAGE / group.real.judge)


def grpo_config(group: ModelGroup) -> GrpoConfig:
    learning = group.learning
    return GrpoConfig(
        lr=learning.lr,
        clip_low=learning.clip_low,
        clip_high=learning.clip_high,
        tis_cap=learning.tis_cap,
        kl=learning.kl,
        temperature=learning.temperature,
        grad_clip=learning.grad_clip,
    )


def learner_and_lengths(group: ModelGroup, staleness: int, seed: int) -> tuple[GrpoLearner, EngineLengths]:
    """What trains the group's policy, and what generates with all versions that it publishes."""
    policy, judge = models_of(group)
    learning = group.learning
    versions = PolicyVersions(policy.config, keep=staleness + 2)
    learner = GrpoLearner(policy, grpo_config(group), vocab=task.VOCAB, published=versions.put)
    serving = {
        Role.ROLLOUT: Serving(policy_sampler(group, seed), task.STOP, learning.max_new_tokens),
        Role.REWARD: Serving(JUDGE_SAMPLER, task.STOP, learning.judge_max_new_tokens),
    }
    folded = ServingModel(judge.config, to_standard(judge))
    return learner, EngineLengths(versions, folded, serving, judge_tokens)

"""The parts of a run that are real: tiny models that generate, judge and learn. Loads torch."""

from __future__ import annotations

from pathlib import Path

import workloads
from harness.errors import UnfitError
from harness.spec import RunSpec
from systems.backends.sim.backend import SimBackend
from systems.backends.sim.cost import ClusterCost
from systems.types import Recipe, Role
from workloads.groups import ModelGroup
from workloads.hops import task
from workloads.hops.workload import HopsWorkload, judge_tokens

try:
    import torch

    from systems.backends.cosim.lengths import EngineLengths, PolicyVersions, Serving
    from systems.learning.grpo import GrpoConfig
    from systems.learning.trainer import GrpoLearner
    from systems.model.sampling import Sampler
    from systems.model.serving import ServingModel
    from systems.model.weights import (
        digest,
        load_model,
        save_model,
        to_standard,
    )
except ModuleNotFoundError as error:
    raise UnfitError(
        f"a run with real models needs '{error.name}': pip install 'pivot-bench[live]', or use --backend sim"
    ) from None

PACKAGE = Path(workloads.__file__).parent


class LearnedPolicy:
    """The weights that a run ends with."""

    def __init__(self, learner: GrpoLearner) -> None:
        self._learner = learner

    def weights_sha256(self) -> str:
        return digest(to_standard(self._learner.model))

    def save(self, directory: Path) -> None:
        save_model(self._learner.model, directory)


def cosimulated(
    spec: RunSpec, cost: ClusterCost, recipe: Recipe
) -> tuple[SimBackend, HopsWorkload, LearnedPolicy]:
    """Real tokens, verdicts and gradients; durations from the cost model."""
    # The bits do not depend on it. A second thread gains a fifth on an idle machine, and loses far more
    # on a busy one, where tiny operators wait for a core that somebody else has.
    torch.set_num_threads(1)
    learner, lengths = learner_and_lengths(spec.group, recipe.staleness, spec.seed)
    backend = SimBackend(spec.kind, cost, lengths, learner)
    return backend, HopsWorkload(spec.seed), LearnedPolicy(learner)


def learner_and_lengths(group: ModelGroup, staleness: int, seed: int) -> tuple[GrpoLearner, EngineLengths]:
    """What trains the group's policy, and what generates with all versions that it publishes."""
    real, learning = group.real, group.learning
    assert real is not None
    policy = load_model(PACKAGE / real.policy)
    judge = load_model(PACKAGE / real.judge)
    versions = PolicyVersions(policy.config, keep=staleness + 2)
    config = GrpoConfig(
        lr=learning.lr,
        clip_low=learning.clip_low,
        clip_high=learning.clip_high,
        tis_cap=learning.tis_cap,
        kl=learning.kl,
        temperature=learning.temperature,
        grad_clip=learning.grad_clip,
    )
    learner = GrpoLearner(policy, config, vocab=task.VOCAB, published=versions.put)
    sampler = Sampler(task.VOCAB, learning.temperature, seed)
    serving = {
        Role.ROLLOUT: Serving(sampler, task.STOP, learning.max_new_tokens),
        Role.REWARD: Serving(Sampler(task.VOCAB, 0.0), task.STOP, learning.judge_max_new_tokens),
    }
    folded = ServingModel(judge.config, to_standard(judge))
    return learner, EngineLengths(versions, folded, serving, judge_tokens)

"""The paper's planner, as far as its artifact tells (sources: artifact-readme, artifact-template).

The throughput of a role is the sum of n / ITL over its replicas. The objective is the harmonic mean of the
two serving roles, weighted by their outstanding sequences. The planner looks for the single move of a block
that gains most over the horizon: horizon x change of the objective, less the tokens that the migrated
sequences lose meanwhile. It moves if that is worth at least `MIN_GAIN`. The training unit comes back as a
whole when a batch is ready, and is lent as a whole while it idles.
"""

from __future__ import annotations

from dataclasses import dataclass

from systems.policies.layouts import Split
from systems.types import Role, View

HORIZON_S = 60.0  # artifact-template; its sensitivity study goes from 5 to 90
MIN_GAIN = 0.05  # of the objective over the horizon (artifact-template)
TICK_S = 1.0  # artifact-template
REST_S = 10.0  # cooldown, and immunity of what has just changed (artifact-template)
MIGRATION_S = 5.0  # what a migration is taken to cost before one was seen (artifact-template)


@dataclass(frozen=True, slots=True)
class Changed:
    """When the split was last changed; never yet: None."""

    at_ns: int | None = None


class Harmonic:
    """ITL model, pressure-weighted harmonic mean, one block at a time."""

    name = "itl-harmonic"
    knows_lengths = False
    tick_s = TICK_S
    cooldown_shifts = 0.0  # it keeps its own, in seconds
    horizon_s = HORIZON_S

    def begin(self) -> Changed:
        return Changed()

    def choose(self, view: View, now: Split, memory: Changed) -> tuple[Split, str, Changed]:
        training = view.training
        home = view.layout.template[Role.TRAIN] // view.layout.block
        least = max(1, -(-view.layout.train_min // view.layout.block))
        home = max(home, least)
        if training.batch_ready and training.started_ns is None and now.train < home:
            return _bring_home(now, home), "a batch is ready", Changed(view.now_ns)
        resting = memory.at_ns is not None and view.now_ns - memory.at_ns < REST_S * 1e9
        if resting:
            return now, "cooldown", memory
        lent = training.started_ns is None and not training.batch_ready
        if lent and now.train:
            split = self._lend_all(view, now)
            return split, f"lends {now.train} blocks of the trainer", Changed(view.now_ns)
        before = objective(view, now)
        best, most = now, MIN_GAIN * self.horizon_s * before
        for split, donor in ((Split(now.rollout - 1, now.reward + 1, now.train), Role.ROLLOUT),
                             (Split(now.rollout + 1, now.reward - 1, now.train), Role.REWARD)):  # fmt: skip
            if min(split) < 0:
                continue
            gain = self.horizon_s * (objective(view, split) - before) - lost_tokens(view, now, donor)
            if gain > most or (before == 0 and best == now and objective(view, split) > 0):
                best, most = split, gain
        if best == now:
            return now, f"keep: {before:.0f} tok/s", memory
        return best, f"gain {most:.0f} tokens", Changed(view.now_ns)

    def _lend_all(self, view: View, now: Split) -> Split:
        """The idle trainer's blocks, each to the role where it raises the objective most."""
        split = Split(now.rollout, now.reward, 0)
        for _ in range(now.train):
            options = (split._replace(rollout=split.rollout + 1), split._replace(reward=split.reward + 1))
            more_rollouts = view.outstanding(Role.ROLLOUT) >= view.outstanding(Role.REWARD)
            ordered = options if more_rollouts else options[::-1]  # ties go to where more waits
            split = max(ordered, key=lambda option: objective(view, option))
        return split


def throughput(view: View, role: Role, blocks: int) -> float:
    """Tokens a second of a role on so many blocks."""
    outstanding = view.outstanding(role)
    replicas = blocks * (view.layout.block // view.layout.width[role])
    if not replicas or not outstanding:
        return 0.0
    estimates = view.estimates
    speed = estimates.speed[role]
    context = estimates.prompt_mean[role] + estimates.length_mean[role] / 2
    fits = max(1.0, min(speed.max_running, speed.kv_capacity_tokens / context))
    each = min(outstanding / replicas, fits)
    if each < 1:
        return outstanding / speed.itl_s(1, context)
    return replicas * each / speed.itl_s(each, each * context)


def objective(view: View, split: Split) -> float:
    """Pressure-weighted harmonic mean of the serving roles' throughputs; 0 if one with work has none."""
    weights = total = 0.0
    for role in (Role.ROLLOUT, Role.REWARD):
        weight = view.outstanding(role)
        if weight:
            tokens = throughput(view, role, split.of(role))
            if tokens == 0:
                return 0.0
            weights += weight
            total += weight / tokens
    return weights / total if total else 0.0


def lost_tokens(view: View, now: Split, donor: Role) -> float:
    """What the sequences of one block lose while they migrate."""
    blocks = now.of(donor)
    running = view.running[donor] / blocks if blocks else 0.0
    if not running:
        return 0.0
    estimates = view.estimates
    each = running / (view.layout.block // view.layout.width[donor])
    context = estimates.prompt_mean[donor] + estimates.length_mean[donor] / 2
    return running * MIGRATION_S / estimates.speed[donor].itl_s(each, each * context)


def _bring_home(now: Split, home: int) -> Split:
    """The unit's blocks back, from both serving roles in proportion to what they have."""
    missing, serving = home - now.train, now.rollout + now.reward
    from_rollout = min(now.rollout, round(missing * now.rollout / serving))
    from_reward = min(now.reward, missing - from_rollout)
    from_rollout = missing - from_reward
    return Split(now.rollout - from_rollout, now.reward - from_reward, home)

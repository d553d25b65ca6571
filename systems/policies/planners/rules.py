"""Rules about queues, without any model of cost: the ablation of a planner (source: artifact-readme).

A serving role whose sequences wait takes a block from the other while nothing waits there. The training unit
is the template's when a batch is ready, and is lent by the same rule while it idles.
"""

from __future__ import annotations

from systems.policies.layouts import Split
from systems.policies.planners.harmonic import Changed, _bring_home
from systems.types import Role, View

TICK_S = 5.0
REST_S = 20.0  # between two changes of mind, so that the last one can show its effect
LONG, SHORT = 1.3, 0.7  # sequences a replica in one role against the other, from which a block moves


class Rules:
    """Thresholds on sequences a replica."""

    name = "rules"
    knows_lengths = False
    tick_s = TICK_S
    cooldown_shifts = 0.0

    def begin(self) -> Changed:
        return Changed()

    def choose(self, view: View, now: Split, memory: Changed) -> tuple[Split, str, Changed]:
        training = view.training
        least = -(-view.layout.train_min // view.layout.block)
        home = max(least, view.layout.template[Role.TRAIN] // view.layout.block)
        if training.batch_ready and training.started_ns is None and now.train < home:
            return _bring_home(now, home), "a batch is ready", Changed(view.now_ns)
        if memory.at_ns is not None and view.now_ns - memory.at_ns < REST_S * 1e9:
            return now, "cooldown", memory
        rollout, reward = _pressure(view, now, Role.ROLLOUT), _pressure(view, now, Role.REWARD)
        if now.train and training.started_ns is None and not training.batch_ready:
            rollouts = round(now.train * rollout / (rollout + reward)) if rollout + reward else 0
            lent = Split(now.rollout + rollouts, now.reward + now.train - rollouts, 0)
            return lent, "the trainer idles", Changed(view.now_ns)
        if rollout > LONG * reward and (now.reward > 1 or not reward) and now.reward:
            return Split(now.rollout + 1, now.reward - 1, now.train), "rollouts wait", Changed(view.now_ns)
        if rollout < SHORT * reward and (now.rollout > 1 or not rollout) and now.rollout:
            return Split(now.rollout - 1, now.reward + 1, now.train), "judgements wait", Changed(view.now_ns)
        return now, "keep: queues are even", memory


def _pressure(view: View, now: Split, role: Role) -> float:
    """Sequences a block; a role without devices has all of its work on one."""
    return view.outstanding(role) / max(1, now.of(role))

"""The steady fluid optimum: seconds an RL step takes in the long run, if lengths do not drift. Pure.

H + 1 batches are in flight. Each goes through rollout, judge and training, and its last sequence must be
through before the batch is due: the chain of the longest response, the judgement after it, and training takes
at most H + 1 step times. Within that, every role works at the batch size that its share of the devices gives
it, so small shares are slow and large batches delay the chain.

    static     each role keeps whole blocks for ever: the best split of blocks
    divisible  devices divide at will and without cost among the roles: what shifting could reach at best

Neither knows bursts: arrivals are even. A run with few batches in flight can be a little faster for a while,
because the first batches are the shortest of those admitted together; in the long run none is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from systems.costs.durations import ClusterDurations
from systems.types import SERVING, Estimates, Layout, Recipe, Role

LATEST = {Role.ROLLOUT: -1, Role.REWARD: -4}  # quantile of a batch's last sequence: of responses the longest;
# the longest judgement is seldom that of the longest response (99.5 %)
FEWEST = 8  # sequences a replica from which batches are tried, in steps of as many
PRECISION = 1e-4  # of a step's time


class Steady(NamedTuple):
    """Seconds a step: the best static split (in blocks: train, rollout, reward), and divisible shares."""

    static_s: float
    static_split: tuple[int, int, int]
    divisible_s: float


@dataclass(frozen=True)
class _Role:
    """A serving role in the long run. `itl[n]` and `read_s` are seconds a token and a sequence's prompt."""

    length: float
    longest: float
    itl: tuple[float, ...]
    read_s: float
    sequences: float  # a step
    width: int

    def a_sequence_s(self, n: int) -> float:
        """Replica-seconds of one sequence where n run."""
        return self.length * self.itl[n] / n + self.read_s

    def latency_s(self, n: int) -> float:
        """How long a batch's last sequence takes: others are read in while it generates."""
        return self.longest * (self.itl[n] + n * self.read_s / self.length)

    def needed(self, step_s: float, replicas: int) -> int | None:
        """The smallest batch that does a step's sequences in time; None if no batch does."""
        share = step_s * replicas / self.sequences
        low, high = 1, len(self.itl) - 1
        if self.a_sequence_s(high) > share:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.a_sequence_s(middle) <= share else (middle + 1, high)
        return low


def steady(cost: ClusterDurations, layout: Layout, recipe: Recipe, estimates: Estimates) -> Steady:
    """Both optima for lengths as they are estimated."""
    roles = {role: _role_of(cost, recipe, estimates, role) for role in SERVING if _works(recipe, role)}
    blocks, least = len(layout.devices) // layout.block, -(-layout.train_min // layout.block)

    def train_s(devices: float) -> float:
        return estimates.train_device_s / devices + estimates.train_fixed_s

    def static_s(train: int, rollout: int, reward: int) -> float:
        replicas = {Role.ROLLOUT: rollout, Role.REWARD: reward}

        def feasible(step_s: float) -> bool:
            chain_s = train_s(train * layout.block)
            if chain_s > step_s:
                return False
            for role, model in roles.items():
                n = model.needed(step_s, replicas[role] * (layout.block // layout.width[role]))
                if n is None:
                    return False
                chain_s += model.latency_s(n)
            return chain_s <= (recipe.staleness + 1) * step_s

        return _least(feasible)

    splits = [
        (train, rollout, blocks - train - rollout)
        for train in range(least, blocks)
        for rollout in range(1, blocks - train + (Role.REWARD not in roles))
        if blocks - train - rollout >= (Role.REWARD in roles)
    ]
    found = [(static_s(*split), split) for split in splits]
    best_s, best = min(found) if found else (float("inf"), (0, 0, 0))
    return Steady(best_s, best, _divisible_s(roles, layout, recipe, estimates))


def _works(recipe: Recipe, role: Role) -> bool:
    return role is Role.ROLLOUT or recipe.judge_calls > 0


def _role_of(cost: ClusterDurations, recipe: Recipe, estimates: Estimates, role: Role) -> _Role:
    serving = cost.serving[role]
    length, cv, prompt = estimates.length_mean[role], estimates.length_cv[role], estimates.prompt_mean[role]
    context = prompt + length * (1 + cv * cv) / 2
    fits = int(max(1, min(serving.max_running, serving.kv_capacity_tokens / context)))
    itl = tuple(serving.token_s(n) + serving.kv_s(n) * n * context if n else 0.0 for n in range(fits + 1))
    calls = 1 if role is Role.ROLLOUT else recipe.judge_calls
    # A group's prompt is read once, and shared; every response is read by its judge.
    read_s = serving.prefill_s(round(prompt)) / (recipe.samples if role is Role.ROLLOUT else calls)
    return _Role(
        length, estimates.length_quantiles[role][LATEST[role]], itl, read_s,
        float(recipe.prompts * recipe.samples * calls), serving.devices,
    )  # fmt: skip


def _divisible_s(roles: dict[Role, _Role], layout: Layout, recipe: Recipe, estimates: Estimates) -> float:
    """All devices always work, at the batch sizes that the chain allows."""
    devices = len(layout.devices)
    training_s = estimates.train_device_s / devices + estimates.train_fixed_s
    sizes = {role: _sizes(model) for role, model in roles.items()}

    def feasible(step_s: float) -> bool:
        allowed_s = (recipe.staleness + 1) * step_s
        for n in sizes[Role.ROLLOUT]:
            for k in sizes.get(Role.REWARD, (0,)):
                work_s = estimates.train_device_s
                chain_s = training_s
                for role, batch in ((Role.ROLLOUT, n), (Role.REWARD, k)):
                    if role in roles:
                        model = roles[role]
                        work_s += model.sequences * model.a_sequence_s(batch) * model.width
                        chain_s += model.latency_s(batch)
                if chain_s <= allowed_s and work_s / devices <= step_s:
                    return True
        return False

    return _least(feasible)


def _sizes(model: _Role) -> list[int]:
    most = len(model.itl) - 1
    return sorted({*range(min(FEWEST, most), most + 1, FEWEST), most})


def _least(feasible: Callable[[float], bool]) -> float:
    """The shortest feasible step, by bisection."""
    low, high = 1e-3, 1e-3
    while not feasible(high):
        low, high = high, high * 2
        if high > 1e9:
            return float("inf")
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high

"""Lower bounds on a run's makespan. A run that beats one has a bug. Pure.

Two bounds, from the work that the run itself reports and the cheapest way to do each piece of it:

    work   all device-seconds at their best rate, spread over all devices without a gap
    chain  publish(v + 1) >= training(v) + the latest of publish(v) and, for every sample of batch v,
           publish(its admission) + its response and its slowest judgement, each alone on a replica,
           once somebody has read its prompt

An engine reads prompts and generates in the same steps, so neither has a cost of its own. Their least costs
are a pair of prices (a generated token, a read token) such that no step, whatever it generates and reads,
costs less than what is in it: then the sum over all tokens is a bound whatever the steps were. There are
many such pairs; a run is bounded by the one that suits it best (`ServingFloor.prices`).

What is not in it: memory that keeps batches small, and that no more sequences can run than are admitted. The
steady fluid optimum knows both (`fluid.py`), and is no bound on a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from systems.types import SERVING, Role


@dataclass(frozen=True, slots=True)
class Price:
    """The least that a generated token and a token that is read in cost together, in device-seconds."""

    generated: float
    read: float


@dataclass(frozen=True, slots=True)
class ServingFloor:
    """The least that one role costs.

    `prices` and `kv_device_s`, for each context token that is attended to, are device-seconds; `token_s`,
    `kv_s` and `read_s` are wall seconds of a sequence that has a replica to itself.
    """

    prices: tuple[Price, ...]
    kv_device_s: float
    token_s: float
    kv_s: float
    read_s: float = 0.0

    def device_s(self, work: RoleWork) -> float:
        """All tokens of a role at the prices that suit them best."""
        tokens = max(work.generated * price.generated + work.read * price.read for price in self.prices)
        return tokens + work.attended * self.kv_device_s

    def latency_s(self, prompt: int, length: int) -> float:
        return prompt * self.read_s + length * self.token_s + attended(prompt, length) * self.kv_s


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that anything costs on this cluster: device-seconds a trained token and a pair of tokens that
    attend, and wall seconds of an RL step's training that no device count shortens."""

    devices: int
    serving: Mapping[Role, ServingFloor]
    train_token_device_s: float
    train_step_s: float
    train_pair_device_s: float = 0.0

    def train_device_s(self, samples: Sequence[SampleWork]) -> float:
        lengths = [sample.prompt + sample.response for sample in samples]
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return sum(lengths) * self.train_token_device_s + pairs * self.train_pair_device_s


class SampleWork(NamedTuple):
    """One trained sample: lengths in tokens, and the version at which its group was admitted. `read` is how
    much of the prompt had to be read for it: all of it for the first of its group."""

    admitted_version: int
    prompt: int
    response: int
    judge_prompt: int
    judgements: tuple[int, ...]
    read: int = 0


@dataclass(slots=True)
class RoleWork:
    """Tokens of a role: generated, read in for the first time, and attended to while generating."""

    generated: int = 0
    read: int = 0
    attended: float = 0.0


class Least(NamedTuple):
    """The least device-seconds of a run's work by what it is for, and the two bounds in seconds."""

    device_s: dict[Role, float]
    work_s: float
    chain_s: float

    @property
    def bound_s(self) -> float:
        return max(self.work_s, self.chain_s)


def attended(prompt: int, length: int) -> float:
    """Context tokens read while `length` tokens are decoded one by one after `prompt`."""
    return length * prompt + length * (length - 1) / 2


def least(steps: Sequence[Sequence[SampleWork]], floor: Floor) -> Least:
    """What these steps take at least."""
    rollout, reward = floor.serving[Role.ROLLOUT], floor.serving[Role.REWARD]
    work = {role: RoleWork() for role in SERVING}
    rolled, judged = work[Role.ROLLOUT], work[Role.REWARD]
    trained_s = 0.0
    published = [0.0]  # earliest time of each version
    for samples in steps:
        scored_s = published[-1]
        for sample in samples:
            rolled.generated += sample.response
            rolled.read += sample.read
            rolled.attended += attended(sample.prompt, sample.response)
            judged.generated += sum(sample.judgements)
            judged.read += sample.judge_prompt if sample.judgements else 0
            judged.attended += sum(attended(sample.judge_prompt, length) for length in sample.judgements)
            alone_s = rollout.latency_s(sample.prompt, sample.response)
            if sample.judgements:
                alone_s += reward.latency_s(sample.judge_prompt, max(sample.judgements))
            scored_s = max(scored_s, published[sample.admitted_version] + alone_s)
        train_device_s = floor.train_device_s(samples)
        trained_s += train_device_s
        published.append(scored_s + train_device_s / floor.devices + floor.train_step_s)
    device_s = {role: floor.serving[role].device_s(work[role]) for role in SERVING} | {Role.TRAIN: trained_s}
    return Least(device_s, sum(device_s.values()) / floor.devices, published[-1])


def lower_bound_s(steps: Sequence[Sequence[SampleWork]], floor: Floor) -> float:
    """No organisation of these devices can finish these steps earlier than this, in seconds."""
    return least(steps, floor).bound_s

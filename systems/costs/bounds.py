"""Lower bounds on a run's makespan, first form. A run that beats one has a bug. Pure.

Two bounds, from the work that the run itself reports and the cheapest way to do each piece of it:

    work   all device-seconds at their best rate, spread over all devices without a gap
    chain  publish(v + 1) >= training(v) + the latest of publish(v) and, for every sample of batch v,
           publish(its admission) + its response and its slowest judgement, each alone on a replica
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from systems.types import Role


@dataclass(frozen=True, slots=True)
class ServingFloor:
    """The least that decoding costs one role.

    `token_device_s` and `kv_device_s` are device-seconds a generated token and a context token read;
    `token_s` and `kv_s` are the same in wall seconds for a sequence that has a replica to itself.
    """

    token_device_s: float
    kv_device_s: float
    token_s: float
    kv_s: float

    def device_s(self, prompt: int, length: int) -> float:
        return length * self.token_device_s + _reads(prompt, length) * self.kv_device_s

    def latency_s(self, prompt: int, length: int) -> float:
        return length * self.token_s + _reads(prompt, length) * self.kv_s


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that anything costs on this cluster."""

    devices: int
    serving: Mapping[Role, ServingFloor]
    train_token_device_s: float  # device-seconds a trained token
    train_step_s: float  # wall seconds of an RL step's training that no device count shortens


class SampleWork(NamedTuple):
    """One trained sample: lengths in tokens, and the version at which its group was admitted."""

    admitted_version: int
    prompt: int
    response: int
    judge_prompt: int
    judgements: tuple[int, ...]


def _reads(prompt: int, length: int) -> float:
    """Context tokens read while `length` tokens are decoded one by one after `prompt`."""
    return length * prompt + length * (length - 1) / 2


def lower_bound_s(steps: Sequence[Sequence[SampleWork]], floor: Floor) -> float:
    """No organisation of these devices can finish these steps earlier than this, in seconds."""
    rollout, reward = floor.serving[Role.ROLLOUT], floor.serving[Role.REWARD]
    device_s = 0.0
    published = [0.0]  # earliest time of each version
    for samples in steps:
        trained = sum(sample.prompt + sample.response for sample in samples)
        scored_s = published[-1]
        for sample in samples:
            device_s += rollout.device_s(sample.prompt, sample.response)
            device_s += sum(reward.device_s(sample.judge_prompt, length) for length in sample.judgements)
            slowest = max(sample.judgements, default=0)
            alone_s = rollout.latency_s(sample.prompt, sample.response)
            alone_s += reward.latency_s(sample.judge_prompt, slowest)
            scored_s = max(scored_s, published[sample.admitted_version] + alone_s)
        train_device_s = trained * floor.train_token_device_s
        device_s += train_device_s
        published.append(scored_s + train_device_s / floor.devices + floor.train_step_s)
    return max(published[-1], device_s / floor.devices)

"""A batch is cut the same way wherever and however it was made."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.batching import canonical_batch
from systems.types import Group, Prompt, Publishing, Recipe, Role, Sample, Segment, Sequence


def recipe(prompts: int, samples: int, mini_batches: int, micro: int) -> Recipe:
    return Recipe(1, prompts, samples, mini_batches, micro, 1, 0, Publishing.DRAIN)


def scored(number: int, samples: int) -> Group:
    made = Group(number, Prompt(7), 0)
    for index in range(samples):
        sample = Sample(number * samples + index, made, reward=float(index))
        sample.response = Sequence(
            sample.id * 2, sample, Role.ROLLOUT, Prompt(7, (1,) * 7), sample.id, length=3
        )
        sample.response.tokens, sample.response.logprobs = [4, 5, 6], [-1.0, -2.0, -3.0]
        sample.response.segments = [Segment(0, 0, 3)]
        made.samples.append(sample)
    return made


@given(st.integers(1, 6), st.integers(2, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_every_sample_is_in_one_micro_batch_in_order(
    per_mini: int, samples: int, minis: int, micro: int, seed: int
) -> None:
    prompts = per_mini * minis
    groups = [scored(number, samples) for number in range(prompts)]
    for group in groups:
        random.Random(seed).shuffle(group.samples)  # the order in which they completed
    batch = canonical_batch(groups, 5, recipe(prompts, samples, minis, micro))
    assert batch.version == 5
    assert [sample.id for sample in batch.samples] == list(range(prompts * samples))
    assert len(batch.mini_batches) == minis
    micros = [one for mini in batch.mini_batches for one in mini]
    assert [one.index for one in micros] == list(range(len(micros)))
    for number, mini in enumerate(batch.mini_batches):
        assert {one.mini_batch for one in mini} == {number}
        assert sum(len(one.samples) for one in mini) == per_mini * samples
        assert all(len(one.samples) == micro for one in mini[:-1])
        assert 1 <= len(mini[-1].samples) <= micro


def test_what_a_trainer_is_told_of_a_sample() -> None:
    (micro,) = canonical_batch([scored(0, 2)], 0, recipe(1, 2, 1, 8)).mini_batches[0]
    one = micro.samples[1]
    assert (one.id, one.group, one.length, one.tokens) == (1, 0, 3, (4, 5, 6))
    assert (one.logprobs, one.segments, one.reward) == ((-1.0, -2.0, -3.0), (Segment(0, 0, 3),), 1.0)
    assert one.total_tokens == 10
    assert micro.total_tokens == 20
    assert micro.total_pairs == 2 * 10 * 11 / 2


def test_a_sample_without_a_response_is_no_sample() -> None:
    group = scored(0, 2)
    group.samples[0].response = None
    with pytest.raises(ValueError, match="sample 0 has no response"):
        canonical_batch([group], 0, recipe(1, 2, 1, 8))

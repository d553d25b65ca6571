import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.lifecycle import IllegalTransition
from systems.staleness import Admission, StalenessViolated
from systems.types import Coming, Group, Prompt, Publishing, Recipe, Role, Sample, Segment, Sequence


def recipe(prompts: int, staleness: int, steps: int = 8) -> Recipe:
    return Recipe(steps, prompts, 2, 1, 8, 1, staleness, Publishing.INTERRUPT)


def group(group_id: int, version: int, samples: int = 2) -> Group:
    made = Group(group_id, Prompt(1), version)
    for index in range(samples):
        sample = Sample(group_id * samples + index, made)
        sample.response = Sequence(sample.id, sample, Role.ROLLOUT, Prompt(1), sample.id)
        sample.response.segments = [Segment(version, 0, 1)]
        made.samples.append(sample)
    return made


@given(
    prompts=st.integers(1, 5), staleness=st.integers(0, 4), steps=st.integers(1, 9), seed=st.integers(0, 999)
)
@settings(max_examples=150, deadline=None)
def test_the_bound_holds_and_nothing_is_stuck(prompts: int, staleness: int, steps: int, seed: int) -> None:
    """Whatever the order in which groups complete, every batch is formed in time and within the bound."""
    rng = random.Random(seed)
    admission = Admission(recipe(prompts, staleness, steps))
    version = batch = 0
    running: list[Group] = []
    consumed: list[int] = []
    while version < steps:
        while batch < steps and admission.admits(batch, version):
            for index in range(prompts):
                running.append(group(batch * prompts + index, version))
                admission.admit(running[-1])
            batch += 1
        while not admission.ready():
            assert running, "nothing is running and no batch is ready"
            admission.score(running.pop(rng.randrange(len(running))))
        taken = admission.take(version)  # raises if a sample is older than the bound
        assert [g.id for g in taken] == sorted(g.id for g in taken)
        consumed.extend(g.id for g in taken)
        version += 1
    assert sorted(consumed) == list(range(steps * prompts))


def test_at_staleness_0_a_batch_is_its_prompts_in_order() -> None:
    admission = Admission(recipe(3, 0))
    groups = [group(index, 0) for index in range(3)]
    for one in groups:
        admission.admit(one)
    for one in (groups[2], groups[0], groups[1]):
        assert not admission.ready()
        admission.score(one)
    assert [g.id for g in admission.take(0)] == [0, 1, 2]
    assert not admission.admits(2, 1)
    assert admission.admits(1, 1)


def test_completion_order_decides_within_a_version() -> None:
    admission = Admission(recipe(1, 2))
    groups = [group(index, 0) for index in range(3)]
    for one in groups:
        admission.admit(one)
    admission.score(groups[2])
    assert [g.id for g in admission.take(0)] == [2]


def test_a_younger_group_does_not_overtake_an_older_version() -> None:
    admission = Admission(recipe(1, 1))
    old, young = group(0, 0), group(1, 1)
    admission.admit(old)
    admission.admit(young)
    admission.score(young)
    assert not admission.ready()


def test_staleness_counts_from_the_oldest_token_not_from_admission() -> None:
    """A group admitted long ago whose first token is young is within the bound, and the other way round."""
    young, old = group(0, 0), group(0, 2)
    for one, version in ((young, 1), (old, 0)):
        for sample in one.samples:
            assert sample.response is not None
            sample.response.segments = [Segment(version, 0, 1), Segment(2, 1, 2)]
    admission = Admission(recipe(1, 1))
    admission.admit(young)
    admission.score(young)
    assert admission.take(2) == [young]
    admission = Admission(recipe(1, 1))
    admission.admit(old)
    admission.score(old)
    with pytest.raises(StalenessViolated, match="begun at version 0 and is consumed at 2"):
        admission.take(2)


def test_a_group_is_scored_once_and_only_when_admitted() -> None:
    admission = Admission(recipe(2, 0))
    with pytest.raises(IllegalTransition, match="group 0 was scored but is not admitted"):
        admission.score(group(0, 0))
    one = group(0, 0)
    admission.admit(one)
    admission.admit(group(1, 0))
    admission.score(one)
    with pytest.raises(IllegalTransition, match="group 0 was scored twice"):
        admission.score(one)
    assert not admission.ready(), "one group scored twice is not a batch of two"
    with pytest.raises(IllegalTransition, match="before it was ready"):
        admission.take(0)


def test_what_is_coming_is_batches_of_admitted_groups_most_complete_first() -> None:
    admission = Admission(recipe(2, 1))
    groups = [group(index, index // 2) for index in range(4)]
    for one, (rolling, judging) in zip(groups, [(2, 0), (0, 1), (1, 1), (0, 2)], strict=True):
        one.rolling, one.judging = rolling, judging
        admission.admit(one)
    assert [[g.id for g in batch] for batch in admission.next_batches()] == [[1, 0], [3, 2]]
    admission.score(groups[0])
    admission.score(groups[1])
    admission.take(0)
    assert [[g.id for g in batch] for batch in admission.next_batches()] == [[3, 2]]


def test_a_batch_that_waits_for_a_training_unit_is_the_first_of_what_is_coming() -> None:
    admission = Admission(recipe(1, 1))
    samples = admission.recipe.samples
    for index, (rolling, judging) in enumerate([(0, 0), (1, 0)]):
        one = group(index, index)
        one.rolling, one.judging = rolling, judging
        admission.admit(one)
        if not rolling and not judging:
            admission.score(one)
    assert admission.batch_ready()
    admission.take(0)
    assert not admission.batch_ready()
    admission.untrained = samples
    assert admission.batch_ready()
    assert admission.coming() == (Coming(0, 0, samples), Coming(1, 0, samples - 1))


@pytest.mark.parametrize(
    ("oldest", "version", "within"), [(0, 0, True), (0, 1, True), (0, 2, False), (2, 1, False)]
)
def test_the_bound_is_inclusive_and_nothing_is_from_the_future(
    oldest: int, version: int, within: bool
) -> None:
    admission = Admission(recipe(1, 1))
    if within:
        admission.check(oldest, version, sample_id=7)
    else:
        with pytest.raises(StalenessViolated, match="sample 7"):
            admission.check(oldest, version, sample_id=7)


def test_a_sample_beyond_the_bound_raises() -> None:
    with pytest.raises(StalenessViolated, match="the bound is 1"):
        Admission(recipe(1, 1)).check(0, 2, sample_id=7)

"""What a run knows of its lengths and costs."""

import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.runs.assemble import assemble
from harness.runs.spec import resolve
from systems import lifecycle
from systems.estimates.estimator import Estimator
from systems.estimates.lengths import LEVELS, estimate
from systems.estimates.truth import TrueLengths
from systems.types import Group, Prompt, Role, Sample, Sequence, SequencePhase
from tests.conftest import simulate, small_spec

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


@given(lengths)
def test_without_running_sequences_it_is_the_sample(ended: list[int]) -> None:
    known = estimate(ended)
    assert known.mean == pytest.approx(fmean(ended))
    assert known.cv == pytest.approx(pstdev(ended) / fmean(ended), abs=1e-6)
    assert (known.quantiles[0], known.quantiles[-1]) == (min(ended), max(ended))
    assert len(known.quantiles) == len(LEVELS)


@given(lengths, lengths)
def test_what_still_runs_only_makes_it_longer(ended: list[int], running: list[int]) -> None:
    known, alone = estimate(ended, running), estimate(ended)
    assert known.mean >= alone.mean * (1 - 1e-9)
    assert all(a <= b for a, b in zip(alone.quantiles, known.quantiles, strict=True))
    assert list(known.quantiles) == sorted(known.quantiles)


@given(lengths)
def test_a_sequence_that_has_just_begun_says_nothing(ended: list[int]) -> None:
    assert estimate(ended, [0] * 50).mean == pytest.approx(estimate(ended).mean)


def test_it_is_right_where_only_the_short_ones_have_ended() -> None:
    """Lengths of which a random part is still running: ends alone are off by a third and more."""
    rng = random.Random(1)
    ended, running = [], []
    for _ in range(20_000):
        length, so_far = 1 + int(rng.expovariate(1 / 1000)), int(rng.uniform(0, 3000))
        (ended if length <= so_far else running).append(min(length, so_far))
    assert fmean(ended) < 750
    assert estimate(ended, running).mean == pytest.approx(1000, rel=0.06)


def test_nothing_is_known_where_nothing_has_ended() -> None:
    with pytest.raises(ValueError, match="no sequence has ended"):
        estimate([], [5])


PARTS = assemble(small_spec(staleness=1))


def group(number: int, length: int, judged: int) -> Group:
    """A finished group of one sample."""
    made = Group(number, Prompt(100), 0)
    sample = Sample(number, made)
    response = Sequence(2 * number, sample, Role.ROLLOUT, made.prompt, 0, length=length)
    lifecycle.begin_sample(sample, response)
    sample.judgements = [Sequence(2 * number + 1, sample, Role.REWARD, Prompt(300), 0, length=judged)]
    for one in (response, *sample.judgements):
        one.phase = SequencePhase.DONE
    return made


def test_batches_are_pooled_over_as_many_as_are_under_way_at_once() -> None:
    estimator = Estimator(PARTS.prior, PARTS.recipe)
    for number, length in enumerate((1000, 2000, 4000)):
        estimator.observe_batch([group(number, length, length // 2)])
    assert estimator.now.length_mean == {Role.ROLLOUT: 3000.0, Role.REWARD: 1500.0}
    assert estimator.now.prompt_mean == {Role.ROLLOUT: 100.0, Role.REWARD: 300.0}


def test_running_sequences_count_with_what_is_known_of_them() -> None:
    under_way = group(1, 500, 10)
    sequence = under_way.samples[0].response
    assert sequence is not None
    sequence.phase = SequencePhase.RUNNING
    ended = [group(0, 1000, 10), group(2, 5000, 10)]
    heard, known = Estimator(PARTS.prior, PARTS.recipe), Estimator(PARTS.prior, PARTS.recipe)
    heard.observe_batch(ended, [under_way])
    assert heard.now.length_mean[Role.ROLLOUT] == pytest.approx((1000 + 5000) / 2)
    known.observe_batch(ended, [under_way], {sequence.id: 2500})
    assert known.now.length_mean[Role.ROLLOUT] == pytest.approx((1000 + 2 * 5000) / 3)


def test_training_is_expected_for_the_batches_to_come_not_for_the_one_that_was() -> None:
    """The first batch is the shortest: what a token takes is what is learned from it."""
    recipe = replace(PARTS.recipe, prompts=1, samples=1)
    estimator = Estimator(PARTS.prior, recipe)
    estimator.observe_batch([group(0, 900, 10)])
    fixed_s = estimator.now.train_fixed_s
    estimator.observe_training(fixed_s + 50.0, devices=4)
    assert estimator.now.train_device_s == pytest.approx(200.0)
    estimator.observe_batch([group(1, 2900, 10)])
    assert estimator.now.train_device_s == pytest.approx(200.0 * (100 + 1900) / 1000)


def test_reading_again_is_dearer_where_contexts_are_longer_by_role() -> None:
    estimator = Estimator(PARTS.prior, PARTS.recipe)
    prior = PARTS.prior
    assert prior.reprefill_s[Role.ROLLOUT] != prior.reprefill_s[Role.REWARD]
    estimator.observe_batch([group(0, 4000, 10)])
    grown = (100 + 2000) / (prior.prompt_mean[Role.ROLLOUT] + prior.length_mean[Role.ROLLOUT] / 2)
    assert estimator.now.reprefill_s[Role.ROLLOUT] == pytest.approx(prior.reprefill_s[Role.ROLLOUT] * grown)


def test_the_reference_planner_is_told_the_lengths_of_what_is_under_way() -> None:
    recipe = replace(PARTS.recipe, prompts=2, steps=10, staleness=1)

    def lengths_of(number: int) -> tuple[int, list[int], list[list[int]]]:
        return 100, [1000 * (number + 1)] * 2, [[500 * (number + 1)]] * 2

    estimator = TrueLengths(PARTS.prior, recipe, lengths_of)
    assert estimator.now.length_mean == {Role.ROLLOUT: 2500.0, Role.REWARD: 1250.0}  # groups 0 to 3
    under_way = [group(number, 1, 1) for number in (2, 3)]
    estimator.observe_batch([group(0, 1000, 500), group(1, 2000, 1000)], under_way)
    assert estimator.now.length_mean[Role.ROLLOUT] == 4500.0  # 2 and 3, and the next batch: 4 and 5


def test_it_runs_in_simulation_alone() -> None:
    spec = small_spec("pivot", gpus=None).model_copy(update={"planner": "clairvoyant"})
    _, tally, _ = simulate(spec)
    assert len(tally.steps) == 3
    with pytest.raises(UsageError, match="only --backend sim knows"):
        resolve(
            system="pivot", model="tiny-dense", backend="cosim", steps=1, seed=0, staleness=None, gpus=None,
            settings=(), planner="clairvoyant",
        )  # fmt: skip

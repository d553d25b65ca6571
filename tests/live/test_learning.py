"""GRPO: the arithmetic by hand, and an update that does not depend on who computed it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

import workloads  # noqa: E402
from systems import types  # noqa: E402
from systems.batching import Batch, MicroBatch, TrainSample, canonical_batch  # noqa: E402
from systems.learning import trainer  # noqa: E402
from systems.learning.grpo import GrpoConfig, advantages, kl_penalty, token_loss  # noqa: E402
from systems.learning.trainer import GrpoLearner  # noqa: E402
from systems.model.engine import Engine, Request  # noqa: E402
from systems.model.qwen3 import Qwen3  # noqa: E402
from systems.model.sampling import Sampler  # noqa: E402
from systems.model.serving import ServingModel  # noqa: E402
from systems.model.weights import digest, load_model, to_standard  # noqa: E402
from systems.types import Group, Prompt, Publishing, Recipe, Role, Sample, Segment  # noqa: E402
from tests.live.conftest import threads  # noqa: E402
from workloads.hops import task  # noqa: E402

MODELS = Path(workloads.__file__).parent / "hops" / "models"
POLICIES = ("dense", "moe")
GROUPS, SAMPLES, MINIS, MICRO = 4, 4, 2, 2  # so a mini-batch is 4 micro-batches: their sums have an order
CONFIG = GrpoConfig(lr=3e-4)

Order = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]


# ------------------------------------------------------------------------------------------- advantages


def scored(rewards: Sequence[float], group: int = 0, first: int = 0) -> list[TrainSample]:
    prompt = Prompt(1, (1,))
    return [
        TrainSample(first + i, group, prompt, 1, (1,), (0.0,), (Segment(0, 0, 1),), reward)
        for i, reward in enumerate(rewards)
    ]


def test_advantages_by_hand() -> None:
    """Mean 0.25, squared deviations 3/4 in all, over 3: standard deviation 0.5."""
    found = advantages(scored([1, 0, 0, 0]))
    assert found == pytest.approx({0: 0.75 / 0.5001, 1: -0.25 / 0.5001, 2: -0.25 / 0.5001, 3: -0.25 / 0.5001})


def test_advantages_are_relative_to_their_own_group() -> None:
    mixed = [*scored([1, 0]), *scored([1, 1, 1], 1, 10), *scored([5, 3], 2, 20)]
    random.Random(0).shuffle(mixed)
    found = advantages(mixed)
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    one = 1 / (math.sqrt(2) + 1e-4)
    expected = {0: half, 1: -half, 10: 0, 11: 0, 12: 0, 20: one, 21: -one}
    assert found == pytest.approx(expected)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_advantages_have_mean_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    found = advantages(scored(rewards))
    assert abs(sum(found.values())) < 1e-6
    assert sum(value**2 for value in found.values()) <= len(rewards) - 1 + 1e-6
    ranked = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(found[a] <= found[b] for a, b in pairwise(ranked))


@pytest.mark.parametrize("samples", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("judge_calls", [1, 2, 3, 5, 7])
def test_a_unanimous_group_has_no_advantage_at_all(samples: int, judge_calls: int) -> None:
    """Exactly 0, for every reward that a mean of verdicts can be: the learner leaves these samples out."""
    for right in range(judge_calls + 1):
        assert set(advantages(scored([right / judge_calls] * samples)).values()) == {0.0}


# ------------------------------------------------------------------------------------------------- loss


def loss_of(ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float]:
    """The loss of a token and its derivative by the token's log-probability."""
    proximal = torch.tensor([[-1.5]], dtype=torch.float64)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    behaviour = proximal - math.log(weight)
    loss = token_loss(logprobs, proximal, behaviour, torch.tensor([[advantage]]).double(), CONFIG)
    assert loss.shape == (1, 1)
    loss.sum().backward()
    assert logprobs.grad is not None
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "loss", "slope"),
    [
        (1.0, 1.5, 1.0, -1.5, -1.5),
        (1.0, -1.5, 1.0, 1.5, 1.5),
        (1.2, 2.0, 1.0, -2.4, -2.4),  # between 1 and 1 + clip_high
        (1.27, 2.0, 1.0, -2.54, -2.54),
        (1.5, 2.0, 1.0, -2.56, 0.0),  # clip-high: 1.28 * 2, and no more push
        (1.5, -2.0, 1.0, 3.0, 3.0),  # a bad token that grew is pushed back in full
        (0.5, 2.0, 1.0, -1.0, -1.0),  # a good token that shrank is pulled up in full
        (0.5, -2.0, 1.0, 1.6, 0.0),  # clip-low: 0.8 * -2, and no more push
        (0.81, -2.0, 1.0, 1.62, 1.62),
        (1.0, 1.0, 1.7, -1.7, -1.7),  # weights below the cap are themselves
        (1.0, 1.0, 0.2, -0.2, -0.2),  # and are not bounded from below
        (1.0, 1.0, 5.0, -2.0, -2.0),  # the cap
        (0.5, -2.0, 5.0, 3.2, 0.0),
        (1.5, 0.0, 1.0, 0.0, 0.0),
    ],
)
def test_token_loss_by_hand(ratio: float, advantage: float, weight: float, loss: float, slope: float) -> None:
    assert loss_of(ratio, advantage, weight) == pytest.approx((loss, slope), abs=1e-9)


def test_the_configured_bounds_are_used() -> None:
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    config = replace(CONFIG, clip_low=0.1, clip_high=0.5, tis_cap=3.0)
    assert float(token_loss(zero + math.log(2), zero, zero, one, config)) == pytest.approx(-1.5)
    assert float(token_loss(zero - math.log(2), zero, zero, -one, config)) == pytest.approx(0.9)
    assert float(token_loss(zero, zero, zero - math.log(4), one, config)) == pytest.approx(-3.0)


def test_an_advantage_applies_to_its_whole_row() -> None:
    logprobs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    advantage = torch.tensor([[1.0], [0.0], [-2.0]])
    loss = token_loss(logprobs, logprobs, logprobs, advantage, CONFIG)
    assert torch.equal(loss, -advantage.expand(3, 5))


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=8))
def test_the_kl_estimate_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    penalty = kl_penalty(logprobs, reference)
    assert float(penalty.min()) >= 0
    assert torch.equal(kl_penalty(logprobs, logprobs), torch.zeros_like(logprobs))


def test_the_kl_estimate_is_right_on_average() -> None:
    policy, reference = (torch.tensor(row).double() for row in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    expected = float((policy * (policy / reference).log()).sum())
    found = float((policy * kl_penalty(policy.log(), reference.log())).sum())
    assert found == pytest.approx(expected)
    assert float(kl_penalty(torch.zeros(1), torch.full((1,), math.log(2)))) == pytest.approx(1 - math.log(2))


# ---------------------------------------------------------------------------------------------- batches


@lru_cache
def generated(name: str) -> tuple[Request, ...]:
    """Responses of the shipped policy, `SAMPLES` to a prompt."""
    model = load_model(MODELS / name)
    rng = random.Random(7)
    prompts = [task.encode(task.make_problem(rng, hops).prompt) for hops in (2, 3, 5, 9)]
    requests = [Request(i, i, prompts[i // SAMPLES], 24) for i in range(GROUPS * SAMPLES)]
    engine = Engine(
        ServingModel(model.config, to_standard(model)), Sampler(task.VOCAB, 1.0, seed=3), task.STOP
    )
    engine.run(requests)
    return tuple(requests)


def recipe(minis: int = MINIS, micro: int = MICRO) -> Recipe:
    return Recipe(1, GROUPS, SAMPLES, minis, micro, 1, 1, Publishing.INTERRUPT)


def groups_of(name: str, rewards: Sequence[float], stale: int = 0, version: int = 0) -> list[Group]:
    """Scored groups; the first `stale` tokens of each response are of the version before `version`."""
    groups = [Group(g, Prompt(0), version) for g in range(GROUPS)]
    for request in generated(name):
        group = groups[request.id // SAMPLES]
        group.prompt = Prompt(len(request.prompt), request.prompt)
        sample = Sample(request.id, group, reward=rewards[request.id])
        length = len(request.tokens)
        old = min(stale, length)
        parts = [Segment(version - 1, 0, old), Segment(version, old, length)]
        sample.response = types.Sequence(
            request.id, sample, Role.ROLLOUT, group.prompt, request.key, length=length,
            tokens=request.tokens, logprobs=request.logprobs,
            segments=[part for part in parts if part.start < part.stop],
        )  # fmt: skip
        group.samples.append(sample)
    return groups


MIXED = (*(1, 0, 0, 1), *(0, 1, 1, 1), *(1, 1, 0, 0), *(0, 0, 1, 0))
UNANIMOUS = (1.0,) * 8 + (0.0,) * 8


def batch_of(name: str, rewards: Sequence[float] = MIXED, stale: int = 0, version: int = 0) -> Batch:
    return canonical_batch(groups_of(name, rewards, stale, version), version, recipe())


@given(st.randoms(use_true_random=False), st.integers(1, GROUPS), st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_a_batch_is_cut_the_same_however_it_was_completed(rng: random.Random, minis: int, micro: int) -> None:
    groups = groups_of("dense", MIXED)
    batch = canonical_batch(groups, 3, recipe(minis, micro))
    for group in groups:
        rng.shuffle(group.samples)
    assert canonical_batch(groups, 3, recipe(minis, micro)) == batch
    micros = [part for mini in batch.mini_batches for part in mini]
    assert [part.index for part in micros] == list(range(len(micros)))
    assert [sample.id for sample in batch.samples] == list(range(GROUPS * SAMPLES))
    assert all(1 <= len(part.samples) <= micro for part in micros)
    assert len(batch.mini_batches) <= minis
    for number, mini in enumerate(batch.mini_batches):
        assert {part.mini_batch for part in mini} == {number}
        members = [sample.group for part in mini for sample in part.samples]
        assert all(members.count(group) == SAMPLES for group in members)  # no group is split
    assert [sample.reward for sample in batch.samples] == list(MIXED)


# ------------------------------------------------------------------------------------------ the learner


def in_order(micros: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    return micros


class Run:
    """A learner on a fresh copy of a shipped policy, and what it published."""

    def __init__(self, name: str, config: GrpoConfig = CONFIG) -> None:
        self.published: dict[int, dict[str, Tensor]] = {}
        self.model: Qwen3 = load_model(MODELS / name)
        self.learner = GrpoLearner(self.model, config, task.VOCAB, self.published.__setitem__)
        self.stats: list[dict[str, float]] = []

    def work(self, batch: Batch, order: Order = in_order, minis: int = MINIS) -> None:
        """Begin, and the first `minis` optimizer steps."""
        self.learner.begin(batch)
        for mini in batch.mini_batches[:minis]:
            for micro in order(mini):
                self.learner.accumulate(micro)
            self.stats.append(dict(self.learner.step().values))

    def learn(self, batch: Batch, order: Order = in_order) -> str:
        self.work(batch, order)
        self.learner.publish()
        return self.digest()

    def digest(self) -> str:
        return digest(to_standard(self.model))

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> dict[int, Tensor]:
        """Of each response's tokens, by the model as it is."""
        return self.logprobs_with_graph(samples)

    def logprobs_with_graph(self, samples: Sequence[TrainSample]) -> dict[int, Tensor]:
        """Computed one response at a time."""
        found = {}
        for sample in samples:
            ids = torch.tensor([(*sample.prompt.tokens, *sample.tokens)])
            logits = self.model(ids[:, :-1])[0, sample.prompt.length - 1 :, : task.VOCAB]
            chosen = torch.tensor(sample.tokens)[:, None]
            found[sample.id] = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        return found


@lru_cache
def undisturbed(name: str) -> tuple[str, str]:
    """Digests after one and two steps on the same responses (the second with stale beginnings)."""
    run = Run(name)
    return run.learn(batch_of(name)), run.learn(batch_of(name, stale=6, version=1))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_micro_batches_does_not_matter(name: str, seed: int) -> None:
    rng = random.Random(seed)
    run = Run(name)
    assert run.learn(batch_of(name), lambda micros: rng.sample(micros, len(micros))) == undisturbed(name)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_and_two_threads_give_the_same_two_steps(name: str) -> None:
    run = Run(name)
    with threads(2):
        first = run.learn(batch_of(name), lambda micros: micros[::-1])
        second = run.learn(batch_of(name, stale=6, version=1), lambda micros: micros[::-1])
        assert torch.get_num_threads() == 2
    assert (first, second) == undisturbed(name)
    assert len({run.digest(), first, digest(run.published[0])}) == 3


@pytest.mark.parametrize(
    ("name", "lost_after"),
    [("dense", when) for when in ("begin", "some gradients", "a step", "all steps", "another batch")]
    + [("moe", "a step")],
)
def test_a_lost_unit_leaves_no_trace(name: str, lost_after: str) -> None:
    """In the first RL step, when the optimizer is empty, and in the second, when it is not."""
    run = Run(name)
    for version, expected in enumerate(undisturbed(name)):
        batch = batch_of(name, stale=6 * version, version=version)
        for _ in range(2):
            disturb(run, batch, lost_after)
        assert run.learn(batch) == expected


def disturb(run: Run, batch: Batch, lost_after: str) -> None:
    learner = run.learner
    if lost_after == "another batch":
        other = tuple(replace(micro, samples=micro.samples[:1]) for micro in batch.mini_batches[0])
        learner.begin(Batch(batch.version, (other,)))
        learner.accumulate(other[0])
        learner.step()
        return
    run.work(batch, minis={"a step": 1, "all steps": MINIS}.get(lost_after, 0))
    if lost_after in ("some gradients", "a step"):
        for micro in batch.mini_batches[-1][1:3]:
            learner.accumulate(micro)


@pytest.mark.parametrize("version", [-1, 1, 7])
def test_a_batch_for_another_version_is_refused(version: int) -> None:
    run = Run("dense")
    before = run.digest()
    with threads(2):
        with pytest.raises(ValueError, match=f"version {version}.*at 0"):
            run.learner.begin(batch_of("dense", version=version))
        assert torch.get_num_threads() == 2
    assert run.digest() == before
    assert run.learn(batch_of("dense")) == undisturbed("dense")[0]
    with pytest.raises(ValueError, match=r"version 0.*at 1"):
        run.learner.begin(batch_of("dense"))


def test_published_weights_are_values() -> None:
    run = Run("dense")
    start = digest(run.published[0])
    assert list(run.published) == [0]
    assert start == digest(to_standard(load_model(MODELS / "dense")))
    run.work(batch_of("dense"))
    assert list(run.published) == [0]
    assert run.learner.version == 0
    assert run.learner.publish() == run.learner.version == 1
    assert list(run.published) == [0, 1]
    assert digest(run.published[1]) == run.digest() == undisturbed("dense")[0]
    run.learn(batch_of("dense", stale=6, version=1))
    assert digest(run.published[0]) == start
    assert digest(run.published[1]) == undisturbed("dense")[0]


# --------------------------------------------------------------------------------- what the update does


@pytest.mark.parametrize("name", POLICIES)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    """Computed anew, one response at a time: bins, padding, masks and the token mean change nothing."""
    run, batch = Run(name, replace(CONFIG, grad_clip=1e9)), batch_of(name)
    if name == "moe":  # its balancing loss is a mean over a forward pass, so it depends on the bins
        run.model.config = replace(run.model.config, router_aux_coef=0.0)
    first = [sample for micro in batch.mini_batches[0] for sample in micro.samples]
    advantage = advantages(batch.samples)
    tokens = sum(sample.length for sample in first)
    loss = torch.zeros(())
    for key, logprobs in run.logprobs_with_graph(first).items():
        behaviour = torch.tensor(generated(name)[key].logprobs)
        assert torch.allclose(logprobs, behaviour, atol=1e-4)
        loss = loss - advantage[key] * (logprobs - behaviour).exp().sum() / tokens
    expected = torch.autograd.grad(loss, list(run.model.parameters()))
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.work(batch, minis=1)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    assert run.stats[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    for parameter, old, gradient in zip(run.model.parameters(), before, expected, strict=True):
        moved = parameter.detach() - old
        clear = gradient.abs() > 1e-4  # elsewhere rounding decides the sign
        # The first step of AdamW moves every weight by the learning rate against its gradient's sign.
        assert torch.allclose(moved[clear], -CONFIG.lr * gradient[clear].sign(), atol=0.02 * CONFIG.lr)


@pytest.mark.parametrize("name", POLICIES)
def test_rewarded_responses_become_more_probable(name: str) -> None:
    """Rewarded are those that say what the first of their group says."""
    said = [request.tokens for request in generated(name)]
    rewards = [float(text == said[i - i % SAMPLES]) for i, text in enumerate(said)]
    run, batch = Run(name, replace(CONFIG, lr=1e-4)), batch_of(name, rewards)
    before = run.logprobs(batch.samples)
    run.learn(batch)
    after = run.logprobs(batch.samples)
    change = {sample.id: float((after[sample.id] - before[sample.id]).sum()) for sample in batch.samples}
    for group in range(GROUPS):
        members = [sample for sample in batch.samples if sample.group == group]
        good = [change[sample.id] for sample in members if sample.reward]
        bad = [change[sample.id] for sample in members if not sample.reward]
        assert sum(good) / len(good) > sum(bad) / len(bad)
    assert sum(change[sample.id] for sample in batch.samples if sample.reward) > 0
    assert sum(advantages(batch.samples)[key] * value for key, value in change.items()) > 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_of_unanimous_groups_teaches_nothing(name: str) -> None:
    run = Run(name)
    start = run.digest()
    assert run.learn(batch_of(name, UNANIMOUS)) == start
    assert [stats["grad_norm"] for stats in run.stats] == [0.0, 0.0]


def test_a_unanimous_group_beside_others_changes_nothing() -> None:
    """It is neither trained on nor counted in the token mean."""
    rewards = (*MIXED[:4], 1, 1, 1, 1, *MIXED[8:])
    batch = batch_of("dense", rewards)
    without = tuple(
        tuple(replace(part, samples=tuple(s for s in part.samples if s.group != 1)) for part in mini)
        for mini in batch.mini_batches
    )
    assert Run("dense").learn(Batch(0, without)) == Run("dense").learn(batch)


def test_large_gradients_are_clipped() -> None:
    run = Run("dense", replace(CONFIG, grad_clip=1e-9))
    start = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.work(batch_of("dense"), minis=1)
    assert run.stats[0]["grad_norm"] > 1e-3
    moved = max(
        float((p.detach() - old).abs().max()) for p, old in zip(run.model.parameters(), start, strict=True)
    )
    assert 0 < moved < 0.9 * CONFIG.lr  # AdamW's epsilon is felt


def test_a_kl_term_pulls_towards_the_reference() -> None:
    """The policy is moved away by hand; rewards say nothing, so only the penalty is left."""
    run, batch = Run("dense", replace(CONFIG, kl=1.0, lr=1e-4)), batch_of("dense", UNANIMOUS)
    reference = run.logprobs(batch.samples)
    with torch.no_grad():
        run.model.head *= 1.3
    before = run.logprobs(batch.samples)
    run.learn(batch)
    after = run.logprobs(batch.samples)

    def distance(found: dict[int, Tensor]) -> float:
        return sum(float(kl_penalty(found[key], reference[key]).sum()) for key in reference)

    assert 0 < distance(after) < distance(before)


# ------------------------------------------------------------------------------------------- staleness

Seen = tuple[Tensor, Tensor]  # proximal and behaviour log-probabilities, as the loss gets them


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """What the learner hands to the token loss, call by call."""
    seen: list[Seen] = []

    def spy(logprobs: Tensor, proximal: Tensor, behaviour: Tensor, *rest: object) -> Tensor:
        seen.append((proximal.clone(), behaviour.clone()))
        return token_loss(logprobs, proximal, behaviour, *rest)

    monkeypatch.setattr(trainer, "token_loss", spy)
    return seen


def by_sample(batch: Batch, seen: list[Seen]) -> dict[int, tuple[Tensor, Tensor]]:
    """Proximal and behaviour of every response's tokens; micro-batches are one bin each here."""
    micros = [micro for mini in batch.mini_batches for micro in mini]
    assert len(seen) == len(micros)
    found = {}
    for micro, (proximal, behaviour) in zip(micros, seen, strict=True):
        rows = sorted(micro.samples, key=lambda sample: (sample.total_tokens, sample.id))
        for row, sample in enumerate(rows):
            part = slice(sample.prompt.length - 1, sample.total_tokens - 1)
            found[sample.id] = (proximal[row, part], behaviour[row, part])
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_fresh_tokens_have_weight_one(name: str, spied: list[Seen]) -> None:
    run, batch = Run(name), batch_of(name)
    run.learn(batch)
    for key, (proximal, behaviour) in by_sample(batch, spied).items():
        assert torch.equal(proximal, behaviour)
        assert torch.equal(behaviour, torch.tensor(generated(name)[key].logprobs))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("stale", [1, 6, 24])
def test_stale_tokens_are_weighed_by_the_policy_that_consumes_them(
    name: str, stale: int, spied: list[Seen]
) -> None:
    run = Run(name)
    run.learn(batch_of(name))
    spied.clear()
    batch = batch_of(name, stale=stale, version=1)
    now = run.logprobs(batch.samples)
    run.work(batch)
    moved = 0.0
    for key, (proximal, behaviour) in by_sample(batch, spied).items():
        assert torch.equal(behaviour, torch.tensor(generated(name)[key].logprobs))
        assert torch.equal(proximal[stale:], behaviour[stale:])
        # The version that began the step, also in the second mini-batch, when the policy has moved on.
        assert torch.allclose(proximal[:stale], now[key][:stale], atol=1e-5)
        moved = max(moved, float((proximal - behaviour)[:stale].abs().max()))
    assert moved > 1e-3


def test_a_weight_changes_the_update() -> None:
    """The same tokens, once declared stale and once fresh, teach differently after an update."""
    digests = set()
    for stale in (0, 24):
        run = Run("dense")
        run.learn(batch_of("dense"))
        digests.add(run.learn(batch_of("dense", stale=stale, version=1)))
    assert len(digests) == 2

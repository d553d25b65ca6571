"""What a sequence generates belongs to the sequence: not to its batch, its engine, or its interruptions."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

import workloads  # noqa: E402
from systems.backends.base import Work  # noqa: E402
from systems.backends.cosim.lengths import EngineLengths, PolicyVersions, Serving  # noqa: E402
from systems.model.engine import Engine, Request  # noqa: E402
from systems.model.qwen3 import Qwen3  # noqa: E402
from systems.model.sampling import Sampler, keyed_uniform  # noqa: E402
from systems.model.serving import ServingModel  # noqa: E402
from systems.model.weights import load_model, to_standard  # noqa: E402
from systems.types import Prompt, Role  # noqa: E402
from tests.live.conftest import threads  # noqa: E402
from workloads.hops import demonstrations as demo  # noqa: E402
from workloads.hops import task  # noqa: E402
from workloads.hops.workload import judge_tokens  # noqa: E402

MODELS = Path(workloads.__file__).parent / "hops" / "models"
POLICIES = ("dense", "moe")
MAX_NEW = 40  # most responses stop before, some do not
SEQUENCES = 18  # two for each prompt, so that prompts are shared
SAMPLER = Sampler(task.VOCAB, 1.0, seed=11)
NEVER = -1  # a stop token that is never drawn

Text = tuple[list[int], list[float]]  # tokens and their log-probabilities

few = settings(max_examples=5, deadline=None, derandomize=True)


@lru_cache
def plain(name: str) -> Qwen3:
    return load_model(MODELS / name).double()


@lru_cache
def serving(name: str) -> ServingModel:
    return ServingModel(plain(name).config, to_standard(plain(name)))


@lru_cache
def prompts() -> tuple[tuple[int, ...], ...]:
    rng = random.Random(4)
    drawn = [task.encode(task.make_problem(rng, 1 + 2 * i).prompt) for i in range(SEQUENCES // 2)]
    return tuple(prompt for prompt in drawn for _ in range(2))


def fresh(index: int, max_new: int = MAX_NEW) -> Request:
    return Request(index, 1000 + index, prompts()[index], max_new)


def texts(requests: list[Request]) -> list[Text]:
    return [(request.tokens, request.logprobs) for request in requests]


def finish(engine: Engine) -> list[Request]:
    """Step until nothing is left; a test fails, rather than hangs, if the engine makes no progress."""
    ended: list[Request] = []
    for _ in range((len(engine.waiting) + len(engine.running)) * (MAX_NEW + 2)):
        if not (engine.waiting or engine.running):
            return ended
        ended += engine.step()
    pytest.fail("the engine makes no progress")


@lru_cache
def alone(name: str) -> tuple[Text, ...]:
    """Each sequence by itself in an engine of its own."""
    requests = [fresh(index) for index in range(SEQUENCES)]
    for request in requests:
        Engine(serving(name), SAMPLER, task.STOP).run([request])
    return tuple(texts(requests))


def test_the_sequences_are_worth_comparing() -> None:
    for name in POLICIES:
        found = alone(name)
        stopped = sum(tokens[-1] == task.STOP for tokens, _ in found)
        assert 0 < stopped < SEQUENCES
        assert len({tuple(tokens) for tokens, _ in found}) > SEQUENCES // 2
        assert len({len(tokens) for tokens, _ in found}) > 4


# -------------------------------------------------------------------------------- placement independence


@pytest.mark.parametrize("name", POLICIES)
@few
@given(
    members=st.lists(st.integers(0, SEQUENCES - 1), min_size=2, max_size=SEQUENCES, unique=True),
    max_running=st.integers(8, 32),
)
def test_neighbours_order_and_room_do_not_matter(name: str, members: list[int], max_running: int) -> None:
    engine = Engine(serving(name), SAMPLER, task.STOP, max_running)
    requests = [fresh(index) for index in members]
    for request in requests:
        engine.submit(request)
    finish(engine)
    assert texts(requests) == [alone(name)[index] for index in members]


@pytest.mark.parametrize("max_running", [1, 3, 7])
def test_a_small_engine_serves_more_sequences_than_it_has_room_for(max_running: int) -> None:
    engine = Engine(serving("dense"), SAMPLER, task.STOP, max_running)
    requests = [fresh(index) for index in range(10)]
    for request in requests:
        engine.submit(request)
    finish(engine)
    assert texts(requests) == list(alone("dense")[:10])


@pytest.mark.parametrize("name", POLICIES)
def test_threads_do_not_matter(name: str) -> None:
    requests = [fresh(index, max_new=5) for index in range(SEQUENCES)]
    with threads(2):
        Engine(serving(name), SAMPLER, task.STOP).run(requests)
    assert texts(requests) == [(tokens[:5], logprobs[:5]) for tokens, logprobs in alone(name)]


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_that_was_used_before_is_as_good_as_new(name: str) -> None:
    engine = Engine(serving(name), SAMPLER, task.STOP, 12)
    for _ in range(2):
        requests = engine.run([fresh(i) for i in reversed(range(SEQUENCES))])
        assert texts(requests) == list(reversed(alone(name)))


def wander(name: str, rng: random.Random) -> tuple[list[Request], list[int]]:
    """Two replicas; sequences arrive one by one, are aborted at any time and continue on either."""
    engines = [Engine(serving(name), SAMPLER, task.STOP, room) for room in (8, 24)]
    requests = [fresh(index) for index in range(SEQUENCES)]
    homeless = rng.sample(requests, SEQUENCES)
    ended: list[int] = []
    for _ in range(3000):
        if len(ended) >= SEQUENCES and not any(engine.waiting or engine.running for engine in engines):
            return requests, ended
        for _ in range(min(len(homeless), rng.randrange(4))):
            engines[rng.randrange(2)].submit(homeless.pop(rng.randrange(len(homeless))))
        for engine in engines:
            ended += [request.id for request in engine.step()]
            if rng.random() < 0.25:
                held = [request.id for request in (*engine.waiting, *engine.running)]
                chosen = rng.sample(held, rng.randrange(len(held) + 1))
                aborted = engine.abort([*chosen, 999])
                assert sorted(request.id for request in aborted) == sorted(chosen)
                homeless += aborted
    pytest.fail("the engines make no progress")


@pytest.mark.parametrize("name", POLICIES)
@few
@given(seed=st.integers(0, 2**32 - 1))
def test_abort_and_resume_anywhere_do_not_matter(name: str, seed: int) -> None:
    requests, ended = wander(name, random.Random(seed))
    assert texts(requests) == list(alone(name))
    assert sorted(ended) == list(range(SEQUENCES))


@pytest.mark.parametrize("name", POLICIES)
def test_a_sequence_resumed_after_every_token_is_the_same(name: str) -> None:
    """Nothing but the first part and the identity is carried over."""
    for index in (0, 7, SEQUENCES - 1):
        tokens, logprobs = alone(name)[index]
        for cut in range(0, len(tokens), 3):
            resumed = fresh(index)
            resumed.tokens, resumed.logprobs = tokens[:cut], logprobs[:cut]
            Engine(serving(name), SAMPLER, task.STOP).run([resumed])
            assert (resumed.tokens, resumed.logprobs) == (tokens, logprobs)


def test_the_key_makes_the_text_and_the_id_does_not() -> None:
    def run(identity: int, key: int, sampler: Sampler = SAMPLER) -> Text:
        request = Request(identity, key, prompts()[8], MAX_NEW)
        return texts(Engine(serving("dense"), sampler, NEVER).run([request]))[0]

    assert run(1, 5) == run(2, 5)
    assert run(1, 5)[0] != run(1, 6)[0]
    assert run(1, 5)[0] != run(1, 5, Sampler(task.VOCAB, 1.0, seed=12))[0]


# ----------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("name", POLICIES)
def test_every_sequence_ends_once_at_the_stop_token_or_at_its_limit(name: str) -> None:
    engine = Engine(serving(name), SAMPLER, task.STOP, 8)
    requests = [fresh(index, max_new=1 + 2 * index) for index in range(SEQUENCES)]
    for request in requests:
        engine.submit(request)
    ended = finish(engine)
    assert sorted(request.id for request in ended) == list(range(SEQUENCES))
    assert not engine.step()
    for request in requests:
        assert len(request.tokens) == len(request.logprobs) <= request.max_new
        assert task.STOP not in request.tokens[:-1]
        assert request.tokens[-1] == task.STOP or len(request.tokens) == request.max_new
        expected = alone(name)[request.id][0][: request.max_new]
        assert request.tokens == expected
    assert {request.tokens[-1] == task.STOP for request in requests} == {True, False}


def test_a_limit_counts_the_tokens_of_before() -> None:
    whole = Engine(serving("dense"), SAMPLER, NEVER).run([fresh(3, 12)])[0]
    for have in range(12):
        resumed = fresh(3, 12)
        resumed.tokens, resumed.logprobs = whole.tokens[:have], whole.logprobs[:have]
        Engine(serving("dense"), SAMPLER, NEVER).run([resumed])
        assert resumed.tokens == whole.tokens
        assert len(resumed.tokens) == 12


@pytest.mark.parametrize(("max_new", "have"), [(0, 0), (3, 3), (3, 4)])
def test_a_request_with_nothing_left_is_refused(max_new: int, have: int) -> None:
    engine = Engine(serving("dense"), SAMPLER, task.STOP)
    spent = Request(42, 0, prompts()[0], max_new, [task.IDS["A"]] * have, [0.0] * have)
    with pytest.raises(ValueError, match="42"):
        engine.submit(spent)
    assert not engine.waiting


def test_aborting_unknown_sequences_does_nothing() -> None:
    engine = Engine(serving("dense"), SAMPLER, task.STOP)
    assert engine.abort([1, 2]) == []
    requests = [fresh(index) for index in range(6)]
    for request in requests:
        engine.submit(request)
    assert engine.abort([77]) == []
    engine.step()
    assert engine.abort([]) == engine.abort([77]) == []
    finish(engine)
    assert texts(requests) == list(alone("dense")[:6])
    assert engine.abort([0]) == []  # it has ended


def test_aborting_one_row_leaves_the_others_alone() -> None:
    """The last row takes the place of the one that leaves."""
    for leaver in range(6):
        engine = Engine(serving("dense"), SAMPLER, task.STOP)
        requests = [fresh(index) for index in range(6)]
        for request in requests:
            engine.submit(request)
        engine.step()
        partial = engine.abort([leaver])
        assert [request.id for request in partial] == [leaver]
        assert len(partial[0].tokens) == 1
        finish(engine)
        others = [request for request in requests if request.id != leaver]
        assert texts(others) == [alone("dense")[request.id] for request in others]
        assert len(partial[0].tokens) == 1


# ----------------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_a_plain_forward(name: str, temperature: float) -> None:
    sampler = Sampler(task.VOCAB, temperature, seed=2)
    requests = Engine(serving(name), sampler, task.STOP, 8).run([fresh(i) for i in range(SEQUENCES)])
    for request in requests[::3]:
        with torch.inference_mode():
            logits = plain(name)(torch.tensor([request.context[:-1]]))[0, len(request.prompt) - 1 :]
        logprobs = (logits[:, : task.VOCAB] / (temperature or 1.0)).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(request.logprobs).double(), expected, rtol=0, atol=1e-6)
        if temperature == 0:
            assert request.tokens == logits.argmax(-1).tolist()


def test_logprobs_are_rounded_to_fp32() -> None:
    for _, logprobs in alone("dense"):
        assert torch.tensor(logprobs, dtype=torch.float64).float().tolist() == logprobs


def drawn(logits: Tensor, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`count` draws from one distribution: a hundred keys, as many positions as are needed."""
    index = torch.arange(count)
    sampler = Sampler(len(logits), temperature, seed=5)
    return sampler.draw(logits.expand(count, -1), index % 100, index // 100)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_should_be(temperature: float) -> None:
    logits = torch.tensor([1.0, -0.5, 0.0, 2.0, -3.0, 0.7])
    count = 20_000
    probability = (logits.double() / temperature).softmax(-1)
    tokens, logprobs = drawn(logits, count, temperature)
    found = torch.bincount(tokens, minlength=6)
    chi_square = float(((found - count * probability) ** 2 / (count * probability)).sum())
    assert chi_square < 20.5  # 0.999 quantile with 5 degrees of freedom
    assert torch.equal(logprobs, probability.log().float()[tokens])


def test_noise_is_uniform_and_belongs_to_seed_key_and_position() -> None:
    key, position = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    noise = keyed_uniform(0, key, position)
    assert float(noise.min()) > 0
    assert float(noise.max()) < 1
    assert len(noise.unique()) == 40_000
    counts = torch.histc(noise, 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 43.8  # 0.999 quantile, 19 degrees of freedom
    table = noise.view(200, 200)
    for earlier, later in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:]), (table, table.t())):
        pair = torch.stack([earlier.flatten(), later.flatten()])
        keep = pair[0] != pair[1]
        assert abs(float(torch.corrcoef(pair[:, keep])[0, 1])) < 0.02
    assert torch.equal(keyed_uniform(0, key[7:9], position[7:9]), noise[7:9])
    assert not bool((keyed_uniform(1, key, position) == noise).any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_vocabulary_are_never_drawn(temperature: float) -> None:
    logits = torch.zeros(500, 80)
    logits[:, task.VOCAB :] = 50.0
    index = torch.arange(500)
    tokens, logprobs = Sampler(task.VOCAB, temperature).draw(logits, index, index)
    assert int(tokens.max()) < task.VOCAB
    assert torch.allclose(logprobs.exp(), torch.tensor(1 / task.VOCAB))


# -------------------------------------------------------------------------------- the engine as a source


def next_version(name: str) -> dict[str, Tensor]:
    """Weights of a policy that is less sure of itself."""
    state = to_standard(plain(name))
    return {**state, "lm_head.weight": state["lm_head.weight"] * 0.8}


def source(name: str = "dense") -> EngineLengths:
    """Versions 0 and 1 of a policy, and the judge."""
    versions = PolicyVersions(plain(name).config, keep=3)
    versions.put(0, to_standard(plain(name)))
    versions.put(1, next_version(name))
    serving_of = {
        Role.ROLLOUT: Serving(SAMPLER, task.STOP, MAX_NEW),
        Role.REWARD: Serving(Sampler(task.VOCAB, 0.0), task.STOP, 60),
    }
    return EngineLengths(versions, serving("judge"), serving_of, judge_tokens)


def rollout(index: int, tokens: tuple[int, ...] = ()) -> Work:
    prompt = Prompt(len(prompts()[index]), prompts()[index])
    return Work(index, 1, Role.ROLLOUT, index, 1000 + index, prompt, len(tokens), tokens)


def judgement(index: int, prompt: tuple[int, ...], tokens: tuple[int, ...] = ()) -> Work:
    return Work(500 + index, 1, Role.REWARD, index, index, Prompt(len(prompt), prompt), len(tokens), tokens)


def everything(lengths: EngineLengths, work: Work, version: int) -> Text:
    tokens, logprobs = lengths.tokens(work, version, lengths.remaining(work, version))
    return list(tokens), list(logprobs)


@pytest.mark.parametrize("name", POLICIES)
@few
@given(announced=st.sets(st.integers(0, SEQUENCES - 1)), asked=st.permutations(range(SEQUENCES)))
def test_what_was_announced_does_not_change_a_continuation(
    name: str, announced: set[int], asked: list[int]
) -> None:
    lengths = source(name)
    for index in sorted(announced):
        lengths.announce(rollout(index), 0)
    for index in asked[:6]:
        assert everything(lengths, rollout(index), 0) == alone(name)[index]
        assert lengths.remaining(rollout(index), 0) == len(alone(name)[index][0])


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_continuation_may_be_taken_in_parts(forgotten: bool) -> None:
    lengths = source()
    for index in range(0, SEQUENCES, 4):
        whole, logprobs = alone("dense")[index]
        cut = len(whole) // 2
        assert lengths.tokens(rollout(index), 0, 0) == ((), ())
        first = lengths.tokens(rollout(index), 0, cut)
        if forgotten:
            lengths.forget([index])
        later = rollout(index, first[0])
        assert lengths.remaining(later, 0) == len(whole) - cut
        rest = everything(lengths, later, 0)
        assert (list(first[0]) + rest[0], list(first[1]) + rest[1]) == (whole, logprobs)


def test_a_new_version_continues_what_an_older_one_wrote() -> None:
    lengths = source()
    successor = ServingModel(plain("dense").config, next_version("dense"))
    differed = 0
    for index in range(SEQUENCES):
        old = alone("dense")[index][0]
        cut = len(old) // 2 if index % 2 else 0
        assert lengths.remaining(rollout(index), 0) == len(old)
        kept = lengths.tokens(rollout(index), 0, cut)[0]
        assert list(kept) == old[:cut]
        expected = fresh(index)
        expected.tokens, expected.logprobs = list(kept), [0.0] * cut
        Engine(successor, SAMPLER, task.STOP).run([expected])
        rest = everything(lengths, rollout(index, kept), 1)
        assert rest == (expected.tokens[cut:], expected.logprobs[cut:])
        differed += rest[0] != old[cut:]
    assert differed


def critique_of(prompt: tuple[int, ...]) -> Text:
    request = Request(0, 0, prompt, 60)
    return texts(Engine(serving("judge"), Sampler(task.VOCAB, 0.0), task.STOP).run([request]))[0]


def test_judgements_prepared_ahead_are_those_made_when_asked() -> None:
    lengths = source()
    for index in range(SEQUENCES):
        lengths.announce(rollout(index), 0)
    responses = [everything(lengths, rollout(index), 0)[0] for index in range(SEQUENCES)]
    for index in reversed(range(SEQUENCES)):
        prompt = judge_tokens(prompts()[index], tuple(responses[index]))
        assert everything(lengths, judgement(index, prompt), 0) == critique_of(prompt)


def test_a_judgement_that_was_not_expected_is_made_all_the_same() -> None:
    lengths = source()
    everything(lengths, rollout(0), 0)
    rng = random.Random(8)
    for index in range(4):
        problem = task.make_problem(rng)
        prompt = task.encode(problem.prompt + demo.flawed(problem, rng) + task.JUDGE_MARK)
        whole = critique_of(prompt)
        assert everything(lengths, judgement(index, prompt), 0) == whole
        cut = len(whole[0]) // 2
        lengths.forget([500 + index])
        rest = everything(lengths, judgement(index, prompt, tuple(whole[0][:cut])), 0)
        assert rest == (whole[0][cut:], whole[1][cut:])


def test_versions_are_kept_as_long_as_they_may_be_needed() -> None:
    versions = PolicyVersions(plain("dense").config, keep=2)
    state = to_standard(plain("dense"))
    for version in range(4):
        versions.put(version, state)
        assert versions.get(version) is versions.get(version)
    assert versions.state(3) is versions.state(2) is state
    assert isinstance(versions.get(2), ServingModel)
    for gone in (0, 1):
        with pytest.raises(KeyError):
            versions.get(gone)

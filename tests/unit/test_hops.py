"""The hops task, its demonstrations and its workload: properties that hold for every problem."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workloads
from systems.rewards import Outcome, reward_of
from systems.types import Group, Prompt, Role, Sample, Sequence
from workloads.hops import demonstrations as demo
from workloads.hops import task
from workloads.hops.workload import HopsWorkload, judge_tokens

PACKAGE = Path(workloads.__file__).parent
SEEDS = st.integers(0, 2**32 - 1)
HOPS = st.one_of(st.none(), st.integers(1, task.MAX_HOPS))
TEXTS = st.text(task.CHARACTERS, max_size=60)


def drawn_problem(seed: int, hops: int | None) -> task.Problem:
    return task.make_problem(random.Random(seed), hops)


PROBLEMS = st.builds(drawn_problem, SEEDS, HOPS)
CHAIN = task.Problem("G", {"H": "4", "G": "h", "A": "x", "X": "3"}, (("G", "h"), ("H", "4")), "4")


def sequence_of(text: str, role: Role, prompt: Prompt, group: int = 0) -> Sequence:
    """A complete sequence of a sample of `group`, with this text."""
    tokens = list(task.encode(text))
    sample = Sample(0, Group(group, prompt, 0))
    return Sequence(0, sample, role, prompt, 0, length=len(tokens), tokens=tokens)


def sample_with(text: str, prompt: Prompt, group: int) -> Sample:
    response = sequence_of(text, Role.ROLLOUT, prompt, group)
    response.sample.response = response
    return response.sample


# ------------------------------------------------------------------------------------------- problems


@given(SEEDS, HOPS)
def test_the_path_leads_from_the_start_to_the_answer_through_edges(seed: int, hops: int | None) -> None:
    problem = drawn_problem(seed, hops)
    node = problem.start
    for source, dest in problem.path:
        assert source == node
        assert problem.edges[source] == dest
        node = dest.upper()
    assert node == problem.answer
    assert problem.answer in task.DIGITS
    sources = [source for source, _ in problem.path]
    assert len(set(sources)) == len(sources)
    if hops is not None:
        assert len(problem.path) == hops


@given(PROBLEMS)
def test_every_edge_leads_to_a_digit_or_to_a_node_with_an_edge(problem: task.Problem) -> None:
    assert len(problem.path) < len(problem.edges) <= len(task.SOURCES)  # there is a distractor
    for source, dest in problem.edges.items():
        assert source in task.SOURCES
        assert dest in task.DIGITS or (dest in task.DESTS and dest.upper() in problem.edges)


@given(PROBLEMS)
def test_a_prompt_says_the_problem(problem: task.Problem) -> None:
    text = problem.prompt
    assert (text[0], text[2], text[-1]) == ("^", "=", ":")
    assert text[1] == problem.start
    edges = text[3:-1]
    assert dict(zip(edges[::2], edges[1::2], strict=True)) == problem.edges


@given(PROBLEMS)
def test_a_prompt_survives_encoding(problem: task.Problem) -> None:
    ids = task.encode(problem.prompt)
    assert task.decode(ids) == problem.prompt
    assert task.decode(list(ids)) == problem.prompt
    assert task.PAD not in ids
    assert task.STOP not in ids


@given(TEXTS)
def test_encoding_is_one_id_a_character(text: str) -> None:
    ids = task.encode(text)
    assert len(ids) == len(text)
    assert all(0 <= i < task.VOCAB for i in ids)
    assert task.decode(ids) == text


def test_unknown_characters_and_ids_stay_in_range() -> None:
    assert task.encode("é\n!") == (task.PAD,) * 3
    assert task.decode([task.VOCAB, task.VOCAB + 4]) == "!!"
    assert len(task.IDS) == task.VOCAB == 75


@given(SEEDS)
def test_a_problem_depends_on_its_stream_alone(seed: int) -> None:
    assert drawn_problem(seed, None) == drawn_problem(seed, None)


def test_hops_have_a_long_tail_within_bounds() -> None:
    rng = random.Random(0)
    hops = sorted(task.draw_hops(rng) for _ in range(4000))
    assert hops[0] == 1
    assert hops[-1] == task.MAX_HOPS
    assert 4 <= hops[2000] <= 6  # the median of lognormal(1.6, 0.65) is 4.95
    assert sum(hops) / 4000 > hops[2000]
    assert hops[3800] >= 12  # p95 is 14.4


def test_edges_are_shuffled() -> None:
    problems = [drawn_problem(seed, 5) for seed in range(200)]
    first = sum(next(iter(problem.edges)) == problem.start for problem in problems)
    assert 0 < first < 80


# --------------------------------------------------------------------------------- answers and verdicts


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("#4.", "4"), ("Gh,H4#4.", "4"), ("#4.#7.", "7"), ("#4", None), ("4.", None), ("#h.", None),
        ("#4,", None), ("#.", None), ("", None), (".", None), ("#4.,", None), ("#44.", None), ("#|.", None),
    ],
)  # fmt: skip
def test_final_answer(response: str, found: str | None) -> None:
    assert task.final_answer(response) == found


@pytest.mark.parametrize(
    ("critique", "value"),
    [
        ("Ghh+H44+#44+>1.", 1.0), ("#94->0.", 0.0), (">1.", 1.0), (">0.", 0.0), (">2.", None),
        (">1", None), ("1.", None), ("", None), (">1.,", None), (">1.>0.", 0.0), (">0.+>1.", 1.0),
    ],
)  # fmt: skip
def test_verdict(critique: str, value: float | None) -> None:
    assert task.verdict(critique) == value


@given(PROBLEMS, st.sampled_from(task.DIGITS), TEXTS)
def test_only_the_final_answer_counts(problem: task.Problem, digit: str, before: str) -> None:
    assert task.is_correct(problem, f"{before}#{digit}.") == (digit == problem.answer)
    assert not task.is_correct(problem, f"{before}#{problem.answer}")


# ------------------------------------------------------------------------------------- demonstrations


@given(PROBLEMS, SEEDS)
def test_a_faultless_walk_is_the_path(problem: task.Problem, seed: int) -> None:
    chain, end = demo.walk(problem, random.Random(seed))
    assert chain == ",".join(source + dest for source, dest in problem.path)
    assert end == problem.answer


@given(PROBLEMS, SEEDS, st.floats(0.01, 1.0))
def test_a_walk_that_goes_astray_still_ends(problem: task.Problem, seed: int, wrong_hop: float) -> None:
    chain, end = demo.walk(problem, random.Random(seed), wrong_hop)
    hops = chain.split(",")
    assert 1 <= len(hops) <= task.MAX_HOPS + 4
    assert all(len(hop) == 2 and hop[0] in problem.edges for hop in hops)
    assert [hop[1].upper() for hop in hops[:-1]] == [hop[0] for hop in hops[1:]]
    assert end is None or hops[-1][1] == end


@given(PROBLEMS, SEEDS)
def test_clean_answers_and_right_guesses_are_right(problem: task.Problem, seed: int) -> None:
    assert task.is_correct(problem, demo.answer(problem, random.Random(seed), 0.0, demo.CLEAN))
    guess = demo.answer(problem, random.Random(seed), 0.0, (1.0, 0.0, 0.0), right_guess=1.0)
    assert guess == f"#{problem.answer}."


@given(PROBLEMS, SEEDS)
def test_a_rechecked_answer_has_the_chain_twice(problem: task.Problem, seed: int) -> None:
    text = demo.answer(problem, random.Random(seed), 0.0, (0.0, 0.0, 1.0))
    first, second = text.removesuffix(f"#{problem.answer}.").split("?")
    assert first == second == demo.walk(problem, random.Random(0))[0]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Gh,H4#4.", "Ghh+H44+#44+>1."),
        ("Gh,H4#5.", "Ghh+H44+#54->0."),
        ("#4.", "Gh,H4,#44+>1."),
        ("#9.", "Gh,H4,#94->0."),
        ("Gx,X3#3.", "Gxh-H4,#34->0."),
        ("Gx,X3#4.", "Gxh-H4,#44+>1."),  # the label is the truth of the answer, not of the walk
        ("Ax,H4#4.", "G|h-H4,#44+>1."),
        ("Gh,H", "Ghh+H|4-#|4->0."),
        ("Gh,H4?Gh,H4#4.", "Ghh+H44+?Ghh+H44+#44+>1."),
        ("Gh,H4?Gx,X3#3.", "Ghh+H44+?Gxh-H4,#34->0."),
        ("G,,H4#4.", "G|h-H4,#44+>1."),
        ("", "G|h-H4,#|4->0."),
    ],
)
def test_critiques_by_hand(response: str, expected: str) -> None:
    assert demo.critique(CHAIN, response) == expected


def check_critique(problem: task.Problem, response: str) -> None:
    text = demo.critique(problem, response)
    right = task.is_correct(problem, response)
    assert text.endswith(">1." if right else ">0.")
    assert task.verdict(text) == float(right)
    assert text.index(".") == len(text) - 1  # '.' stops generation
    assert task.PAD not in task.encode(text)


@given(PROBLEMS, SEEDS)
def test_a_critique_of_a_demonstration_tells_the_truth(problem: task.Problem, seed: int) -> None:
    rng = random.Random(seed)
    check_critique(problem, demo.answer(problem, rng, 0.0, demo.CLEAN))
    check_critique(problem, demo.answer(problem, rng, 0.12, demo.NOISY))
    check_critique(problem, demo.flawed(problem, rng))


@given(PROBLEMS, TEXTS, st.booleans())
def test_a_critique_of_any_text_tells_the_truth(problem: task.Problem, text: str, right: bool) -> None:
    check_critique(problem, text)
    check_critique(problem, f"{text}#{problem.answer if right else (int(problem.answer) + 1) % 10}.")


@given(PROBLEMS, TEXTS)
def test_a_critique_walks_the_true_path_whatever_it_reads(problem: task.Problem, response: str) -> None:
    body = demo.critique(problem, response).rsplit("#", 1)[0].split("?")[-1]
    walked = []
    while body:
        quoted = len(body) > 3 and body[3] in "+-" and body[2] != ","
        walked.append((body[0], body[2] if quoted else body[1]))
        body = body[4 if quoted else 3 :]
    assert tuple(walked) == problem.path


@given(PROBLEMS, SEEDS)
def test_flaws_are_readable_and_leave_the_judges_mark_alone(problem: task.Problem, seed: int) -> None:
    rng = random.Random(seed)
    good = demo.answer(problem, rng, 0.0, (0.0, 0.75, 0.25))
    for flaw in demo.FLAWS:
        text = flaw(problem, good, rng.randrange(len(problem.path)), rng)
        assert task.JUDGE_MARK not in text
        assert task.decode(task.encode(text)) == text
    assert len(demo.FLAWS) == len(demo.FLAW_WEIGHTS)


def test_the_judge_practises_on_both_truths() -> None:
    rng = random.Random(1)
    right = 0
    for _ in range(1000):
        problem = task.make_problem(rng)
        right += task.is_correct(problem, demo.flawed(problem, rng))
    assert 350 < right < 750


def test_noisy_answers_have_the_declared_shares() -> None:
    rng = random.Random(2)
    kinds: Counter[str] = Counter()
    right = 0
    for _ in range(2000):
        problem = task.make_problem(rng)
        text = demo.answer(problem, rng, 0.12, demo.NOISY)
        kind = "guess" if text.startswith("#") else "recheck" if "?" in text else "chain"
        kinds[kind] += 1
        right += kind == "guess" and task.is_correct(problem, text)
    assert abs(kinds["guess"] / 2000 - 0.50) < 0.05
    assert abs(kinds["chain"] / 2000 - 0.38) < 0.05
    assert abs(kinds["recheck"] / 2000 - 0.12) < 0.04
    assert abs(right / kinds["guess"] - 0.28) < 0.06  # 20 % on purpose, a tenth of the rest by luck


@given(SEEDS)
def test_pairs_are_contexts_and_completions_that_stop(seed: int) -> None:
    for pair in (demo.policy_pair, demo.clean_pair, demo.short_pair):
        context, completion = pair(random.Random(seed))
        assert context.startswith("^")
        assert context.endswith(":")
        assert completion.index(".") == len(completion) - 1
    for pair in (demo.judge_pair, demo.short_judge_pair):
        context, completion = pair(random.Random(seed))
        assert context.startswith("^")
        assert context.index(task.JUDGE_MARK) == len(context) - 1
        assert task.verdict(completion) is not None


# ------------------------------------------------------------------------------------------- workload


@given(st.integers(0, 10_000), st.lists(st.integers(0, 10_000), min_size=1, max_size=8, unique=True))
def test_a_prompt_depends_on_seed_and_group_alone(seed: int, groups: list[int]) -> None:
    here, there = HopsWorkload(seed), HopsWorkload(seed)
    prompts = {group: here.prompt(group) for group in groups}
    assert {group: there.prompt(group) for group in reversed(groups)} == prompts
    for prompt in prompts.values():
        assert prompt.length == len(prompt.tokens)
        assert task.decode(prompt.tokens).endswith(":")


def test_seeds_and_groups_have_prompts_of_their_own() -> None:
    prompts = {HopsWorkload(seed).prompt(group).tokens for seed in range(20) for group in range(20)}
    assert len(prompts) == 400


def test_a_forgotten_problem_is_drawn_again_the_same() -> None:
    workload = HopsWorkload(3)
    first = workload.prompt(0)
    for group in range(1, 4200):  # more than are remembered
        workload.prompt(group)
    assert workload.prompt(0) == first


@given(st.integers(0, 500), st.integers(0, 500), SEEDS)
def test_the_judge_reads_problem_response_and_mark(seed: int, group: int, noise: int) -> None:
    workload = HopsWorkload(seed)
    prompt = workload.prompt(group)
    response = demo.answer(drawn_of(seed, group), random.Random(noise), 0.12, demo.NOISY)
    read = workload.judge_prompt(sample_with(response, prompt, group))
    assert task.decode(read.tokens) == task.decode(prompt.tokens) + response + task.JUDGE_MARK
    assert read.length == len(read.tokens)
    assert read.tokens == judge_tokens(prompt.tokens, task.encode(response))


def drawn_of(seed: int, group: int) -> task.Problem:
    """The problem that a prompt of the workload states, read from its text."""
    text = task.decode(HopsWorkload(seed).prompt(group).tokens)
    edges = dict(zip(text[3:-1:2], text[4:-1:2], strict=True))
    path, node = [], text[1]
    while node in edges:
        path.append((node, edges[node]))
        node = edges[node].upper()
    return task.Problem(text[1], edges, tuple(path), node)


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from(task.DIGITS))
def test_truth_is_the_answer_of_the_groups_own_problem(seed: int, group: int, digit: str) -> None:
    workload = HopsWorkload(seed)
    sample = sample_with(f"#{digit}.", workload.prompt(group), group)
    assert workload.truth(sample) == float(digit == drawn_of(seed, group).answer)


@pytest.mark.parametrize(
    ("text", "outcome", "reward"),
    [
        ("#44+>1.", Outcome.SCORED, 1.0),
        ("#94->0.", Outcome.SCORED, 0.0),
        ("#4", Outcome.UNPARSABLE, 0.0),
        ("", Outcome.UNPARSABLE, 0.0),
    ],
)
def test_a_judgement_without_a_verdict_is_worth_nothing(text: str, outcome: Outcome, reward: float) -> None:
    verdict = HopsWorkload(0).verdict(sequence_of(text, Role.REWARD, Prompt(0)))
    assert verdict.outcome is outcome
    assert reward_of([verdict]) == reward


# ---------------------------------------------------------------------------------------------- limits


LIMITS = ("max_new_tokens", "judge_max_new_tokens")


def positions(model: str) -> int:
    config = json.loads((PACKAGE / "hops" / "models" / model / "config.json").read_text())
    return int(config["max_position_embeddings"])


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def group_file(request: pytest.FixtureRequest) -> dict[str, dict[str, object]]:
    return tomllib.loads((PACKAGE / "groups" / f"{request.param}.toml").read_text())


def test_the_longest_prompt_leaves_room_for_response_and_critique(
    group_file: dict[str, dict[str, object]],
) -> None:
    response, critique = (int(str(group_file["learning"][key])) for key in LIMITS)
    prompt = len("^G=:") + 2 * len(task.SOURCES)
    policy, judge = (Path(str(group_file["real"][key])).name for key in ("policy", "judge"))
    assert prompt + response <= positions(policy)
    assert prompt + response + len(task.JUDGE_MARK) + critique <= positions(judge)


@given(seed=SEEDS, hops=HOPS)
@settings(max_examples=200)
def test_demonstrated_answers_and_their_critiques_can_be_written_in_full(seed: int, hops: int | None) -> None:
    learning = tomllib.loads((PACKAGE / "groups" / "tiny-dense.toml").read_text())["learning"]
    rng = random.Random(seed)
    problem = task.make_problem(rng, hops)
    assert len(problem.prompt) <= len("^G=:") + 2 * len(task.SOURCES)
    response = demo.answer(problem, rng, 0.12, demo.NOISY)
    assert len(response) <= learning["max_new_tokens"]
    assert len(demo.critique(problem, response)) <= learning["judge_max_new_tokens"]


def test_the_workload_needs_no_torch() -> None:
    code = (
        "import sys, workloads.hops.workload, workloads.hops.demonstrations;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

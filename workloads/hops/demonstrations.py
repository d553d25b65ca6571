"""Demonstrations that the tiny models are warm-started on: noisy answers and exact critiques."""

from __future__ import annotations

import random
from collections.abc import Callable

from workloads.hops.task import (
    DESTS,
    DIGITS,
    JUDGE_MARK,
    MAX_HOPS,
    SOURCES,
    Problem,
    final_answer,
    make_problem,
)

Pair = tuple[str, str]  # (context, completion to learn)
Mix = tuple[float, float, float]  # shares of guesses, chains and rechecked chains

CLEAN: Mix = (0.0, 0.85, 0.15)
NOISY: Mix = (0.50, 0.38, 0.12)


def walk(problem: Problem, rng: random.Random, wrong_hop: float = 0.0) -> tuple[str, str | None]:
    """A chain in which each hop goes astray with probability `wrong_hop`, and where it ended."""
    source = problem.start
    hops: list[str] = []
    for _ in range(MAX_HOPS + 4):
        dest = problem.edges[source]
        if wrong_hop and rng.random() < wrong_hop:
            dest = rng.choice(list(problem.edges.values()))
        hops.append(source + dest)
        if dest in DIGITS:
            return ",".join(hops), dest
        source = dest.upper()
        if source not in problem.edges:
            break
    return ",".join(hops), None


def answer(problem: Problem, rng: random.Random, wrong_hop: float, mix: Mix, right_guess: float = 0.2) -> str:
    """A response: a guess, a chain, or a chain written twice."""
    which = rng.random()
    if which < mix[0]:
        return f"#{problem.answer if rng.random() < right_guess else rng.choice(DIGITS)}."
    chain, end = walk(problem, rng, wrong_hop)
    if which >= mix[0] + mix[1]:
        again, end = walk(problem, rng, wrong_hop)
        chain = f"{chain}?{again}"
    return f"{chain}#{end or rng.choice(DIGITS)}."


def critique(problem: Problem, response: str) -> str:
    """The judgement to learn: hop by hop until the first mismatch, then the verdict on the answer.

    A hop is source, the destination quoted from the response (or '|'), the true destination, and '+'
    or '-'. After a mismatch, and for a guess, the rest of the path is walked without quotes. The
    verdict is whether the final answer is true, not whether the walk was clean.
    """
    parts: list[str] = []
    cursor = 0
    agrees = not response.startswith("#")
    while True:
        for source, dest in problem.path:
            if not agrees:
                parts.append(f"{source}{dest},")
                continue
            quoted = response[cursor + 1 : cursor + 2] if response[cursor : cursor + 1] == source else ""
            quoted = quoted if quoted and quoted in DESTS + DIGITS else "|"
            agrees = quoted == dest
            parts.append(f"{source}{quoted}{dest}{'+' if agrees else '-'}")
            cursor += 3 if response[cursor + 2 : cursor + 3] == "," else 2
        if not (agrees and response[cursor : cursor + 1] == "?"):
            break
        parts.append("?")
        cursor += 1
    given = final_answer(response) or "|"
    ending = "+>1." if given == problem.answer else "->0."
    return f"{''.join(parts)}#{given}{problem.answer}{ending}"


def flawed(problem: Problem, rng: random.Random) -> str:
    """A response for the judge to practise on: right, wrong, truncated, garbled or padded."""
    which = rng.random()
    if which < 0.25:
        return answer(problem, rng, 0.0, (0.3, 0.5, 0.2), right_guess=1.0)
    if which < 0.60:
        return answer(problem, rng, rng.choice([0.02, 0.06, 0.2]), (0.3, 0.5, 0.2), right_guess=0.3)
    good = answer(problem, rng, 0.0, (0.0, 0.75, 0.25))
    hop = rng.randrange(len(problem.path))
    return rng.choices(FLAWS, FLAW_WEIGHTS)[0](problem, good, hop, rng)


def _wrong_digit(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    return good[:-2] + rng.choice(DIGITS) + "."


def _garbled(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    at = rng.randrange(len(good) - 1)
    return good[:at] + rng.choice(DIGITS + SOURCES + DESTS + ",#?") + good[at + 1 :]


def _skipped_hop(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    return good[: 3 * hop] + good[3 * hop + 3 :]


def _early_answer(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    return good[: max(0, 3 * hop - 1)] + f"#{rng.choice(DIGITS)}."


def _truncated(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    return good[: rng.randrange(1, len(good))]


def _repeated(problem: Problem, good: str, hop: int, rng: random.Random) -> str:
    return good[:-3] + f"?{walk(problem, rng)[0]}" * rng.randrange(1, 3) + f"#{problem.answer}."


Flaw = Callable[[Problem, str, int, random.Random], str]
FLAWS: list[Flaw] = [_wrong_digit, _garbled, _skipped_hop, _early_answer, _truncated, _repeated]
FLAW_WEIGHTS = [0.25, 0.30, 0.15, 0.12, 0.10, 0.08]


def policy_pair(rng: random.Random) -> Pair:
    problem = make_problem(rng)
    return problem.prompt, answer(problem, rng, 0.12, NOISY)


def clean_pair(rng: random.Random) -> Pair:
    problem = make_problem(rng)
    return problem.prompt, answer(problem, rng, 0.0, CLEAN)


def short_pair(rng: random.Random) -> Pair:
    problem = make_problem(rng, rng.randint(1, 3))
    return problem.prompt, answer(problem, rng, 0.0, CLEAN)


def judge_pair(rng: random.Random, hops: int | None = None) -> Pair:
    problem = make_problem(rng, hops)
    response = flawed(problem, rng)
    return problem.prompt + response + JUDGE_MARK, critique(problem, response)


def short_judge_pair(rng: random.Random) -> Pair:
    return judge_pair(rng, rng.randint(1, 3))

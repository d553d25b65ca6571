"""The task: follow edges from a start node to the digit at the end of its chain.

    prompt   ^G=4hGhAXa:     start G, then edges (source, dest) shuffled, with distractors
    guess    #9.             an answer without work
    chain    Gh,H4#4.        one hop is source, dest; then the answer
    recheck  Gh,H4?Gh,H4#4.  the chain twice
    judge    a critique that walks the true path, then '>1.' or '>0.' on the final answer

Upper case names a node as a source and lower case the same node as a destination; a digit ends a
chain. The number of hops is lognormal, so lengths have a long tail. Nothing here needs torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SOURCES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DESTS = SOURCES.lower()
DIGITS = "0123456789"
CHARACTERS = "_^=:#?.,|>+-;" + DIGITS + SOURCES + DESTS
IDS = {character: index for index, character in enumerate(CHARACTERS)}
PAD, STOP = IDS["_"], IDS["."]
VOCAB = len(CHARACTERS)  # ids from here to the models' padded vocabulary are never drawn
LONGEST_PROMPT = len("^G=:") + 2 * len(SOURCES)  # every node has an edge
JUDGE_MARK = "|"  # separates the response from the critique in the judge's prompt

MAX_HOPS = 20
HOPS_LOG_MEAN, HOPS_LOG_SIGMA = 1.6, 0.65


def encode(text: str) -> tuple[int, ...]:
    return tuple(IDS.get(character, PAD) for character in text)


def decode(ids: list[int] | tuple[int, ...]) -> str:
    return "".join(CHARACTERS[i] if i < VOCAB else "!" for i in ids)


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt: `edges` maps a source to its destination; `path` is the true chain of (source, dest)."""

    start: str
    edges: dict[str, str]
    path: tuple[tuple[str, str], ...]
    answer: str

    @property
    def prompt(self) -> str:
        return f"^{self.start}=" + "".join(source + dest for source, dest in self.edges.items()) + ":"


def draw_hops(rng: random.Random) -> int:
    return max(1, min(MAX_HOPS, round(rng.lognormvariate(HOPS_LOG_MEAN, HOPS_LOG_SIGMA))))


def make_problem(rng: random.Random, hops: int | None = None) -> Problem:
    """A problem with a chain of `hops` edges (drawn if None) and distractors beside it."""
    hops = hops or draw_hops(rng)
    nodes = min(len(SOURCES), hops + 1 + rng.randrange(0, 2 + hops // 2))
    labels = rng.sample(range(len(SOURCES)), nodes)
    chain, others = labels[:hops], labels[hops:]
    answer = rng.choice(DIGITS)
    edges: dict[str, str] = {}
    for index, node in enumerate(chain):
        edges[SOURCES[node]] = DESTS[chain[index + 1]] if index + 1 < hops else answer
    for index, node in enumerate(others):
        ends = index == 0 or rng.random() < 0.4
        edges[SOURCES[node]] = rng.choice(DIGITS) if ends else DESTS[rng.choice(labels)]
    shuffled = list(edges.items())
    rng.shuffle(shuffled)
    path = tuple((SOURCES[node], edges[SOURCES[node]]) for node in chain)
    return Problem(SOURCES[chain[0]], dict(shuffled), path, answer)


def final_answer(response: str) -> str | None:
    """The digit of a response that ends in '#<digit>.', else None."""
    if len(response) >= 3 and response[-1] == "." and response[-3] == "#" and response[-2] in DIGITS:
        return response[-2]
    return None


def is_correct(problem: Problem, response: str) -> bool:
    return final_answer(response) == problem.answer


def verdict(critique: str) -> float | None:
    """1 or 0 as the critique ends in '>1.' or '>0.'; None if it cannot be parsed."""
    return {">1.": 1.0, ">0.": 0.0}.get(critique[-3:])

"""What judgements are worth: the one rule that turns verdicts into a reward. Pure.

| outcome    | what happened                                     | it is worth        |
|------------|---------------------------------------------------|--------------------|
| scored     | the judgement's text says what the response is worth | its score       |
| unparsable | the text ended, or was cut off, without a verdict | 0                  |
| failed     | the judge could not write it                      | 0                  |
| timed out  | the judge did not write it in time                | 0                  |
| not real   | there is no text, only a length                   | nothing is learned |

A response is worth the mean of its judgements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """What became of a judgement."""

    SCORED = "scored"
    UNPARSABLE = "unparsable"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_REAL = "not real"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judgement says of a response; `score` counts only where it was scored."""

    outcome: Outcome
    score: float = 0.0


NOT_REAL = Verdict(Outcome.NOT_REAL)
UNPARSABLE = Verdict(Outcome.UNPARSABLE)


def reward_of(verdicts: Sequence[Verdict]) -> float | None:
    """The reward of a response with these judgements; None where text is not real."""
    scores = [worth(verdict) for verdict in verdicts if verdict.outcome is not Outcome.NOT_REAL]
    return sum(scores) / len(scores) if scores else None


def worth(verdict: Verdict) -> float:
    """What one judgement is worth: nothing but a verdict is worth anything."""
    return verdict.score if verdict.outcome is Outcome.SCORED else 0.0


def trained_on(reward: float | None) -> float:
    """What the trainer is told: where nothing is real nothing is learned, and the number does not matter."""
    return 0.0 if reward is None else reward

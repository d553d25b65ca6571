"""What judgements are worth."""

from __future__ import annotations

import pytest

from systems.rewards import NOT_REAL, UNPARSABLE, Outcome, Verdict, reward_of, trained_on, worth


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_verdict_is_worth_anything(outcome: Outcome) -> None:
    assert worth(Verdict(outcome, 0.75)) == (0.75 if outcome is Outcome.SCORED else 0.0)


def test_a_response_is_worth_the_mean_of_its_judgements() -> None:
    good, bad = Verdict(Outcome.SCORED, 1.0), Verdict(Outcome.SCORED, 0.0)
    assert reward_of([good, bad]) == 0.5
    assert reward_of([good, UNPARSABLE, Verdict(Outcome.FAILED), Verdict(Outcome.TIMED_OUT)]) == 0.25
    assert reward_of([UNPARSABLE]) == 0.0


def test_where_nothing_is_real_there_is_no_reward_and_nothing_is_learned() -> None:
    assert reward_of([NOT_REAL, NOT_REAL]) is None
    assert trained_on(None) == 0.0
    assert trained_on(0.5) == 0.5

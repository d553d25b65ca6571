"""Continuous batching in closed form against the oracle that takes every step."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.backends.sim.replica import Arrival, Replica
from systems.costs.durations import BLOCK, Bounds, Costs
from systems.policies import SYSTEMS
from tests.conftest import simulate, small_spec
from tests.sim.reference_replica import Reference

COSTS = Costs(
    alpha_s=lambda n: 5e-3 + 7e-5 * n,
    beta_s=lambda n: 3e-8 * (1 + 0.5 / n),
    mixed_s=lambda n, kv, queries, pairs, context, starting: (
        6e-3 + 6e-5 * (n + queries) + 3e-8 * kv + 1e-9 * pairs + 1e-8 * context + 1e-4 * starting
    ),
)
Moment = tuple[float, int, int, int, int]  # when, id, context, remaining, tokens whose cache is brought


def closed_form(bounds: Bounds, arrivals: list[Moment]) -> tuple[list[tuple[int, float]], Replica]:
    replica, ends = Replica(COSTS, bounds), []
    for when, together in itertools.groupby(arrivals, key=lambda arrival: arrival[0]):
        ends.extend((end.id, end.time_s) for end in replica.advance(when))
        replica.add(when, [Arrival(*rest, held=held) for _, *rest, held in together])
    while (when_next := replica.next_s()) is not None:
        ends.extend((end.id, end.time_s) for end in replica.advance(when_next))
    return ends, replica


def compare(bounds: Bounds, arrivals: list[Moment]) -> tuple[Replica, Reference]:
    oracle = Reference(COSTS, bounds)
    expected = sorted(oracle.run(arrivals))
    ends, replica = closed_form(bounds, arrivals)
    assert [number for number, _ in sorted(ends)] == [number for number, _ in expected]
    for (_, found), (_, wanted) in zip(sorted(ends), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
    assert replica.preemptions == len(oracle.preemptions)
    assert replica.sequences == 0
    assert replica._free == bounds.blocks
    assert sum(replica._residues) == replica._kv == replica.kv_tokens(1e9) == 0
    return replica, oracle


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Bounds, list[Moment]]:
    count = draw(st.integers(1, 25))
    arrivals, when = [], 0.0
    for number in range(count):
        when += draw(st.sampled_from([0.0, 0.0, 0.001, 0.05, 1.0]))
        context, held = draw(st.integers(1, 300)), draw(st.just(0) | st.integers(0, 300))
        arrivals.append((when, number, context, draw(st.integers(1, 200)), held))
    longest = max(context + remaining for _, _, context, remaining, _ in arrivals)
    least = -(-longest // BLOCK) + 1
    blocks = draw(st.integers(least, least * 4))
    bounds = Bounds(draw(st.integers(1, 12)), draw(st.sampled_from([16, 64, 256, 2048])), blocks)
    return bounds, arrivals


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_closed_form_equals_step_by_step(drawn: tuple[Bounds, list[Moment]]) -> None:
    bounds, arrivals = drawn
    compare(bounds, arrivals)


def test_preemption_is_reached() -> None:
    """Twenty sequences that grow beyond the memory together."""
    arrivals = [(0.0, number, 100, 150 + 7 * number, 0) for number in range(20)]
    replica, oracle = compare(Bounds(20, 2048, 200), arrivals)
    assert replica.preemptions == len(oracle.preemptions) > 5


def test_one_decode_stretch_by_hand() -> None:
    ends, _ = closed_form(Bounds(8, 2048, 1000), [(2.0, 0, 10, 4, 0)])
    read = COSTS.mixed_s(0, 0, 10, 55, 10, 1)
    decode = 3 * COSTS.alpha_s(1) + COSTS.beta_s(1) * (10 + 11 + 12)
    assert ends == [(0, pytest.approx(2.0 + read + decode, rel=1e-12))]


def test_a_shared_prefix_is_read_once_and_held_once() -> None:
    replica = Replica(COSTS, Bounds(8, 4096, 1000))
    replica.add(0.0, [Arrival(number, 170, 50, prefix=7, prefix_tokens=160) for number in range(4)])
    first = replica.next_s()
    assert first == pytest.approx(COSTS.mixed_s(0, 0, 170 + 3 * 10, *pairs_after(160, 170), 4))
    replica.advance(first or 0.0)
    assert replica._free == 1000 - 160 // BLOCK - 4  # one more block each for the rest
    while (when := replica.next_s()) is not None:
        replica.advance(when)
    assert replica._free == 1000
    assert not replica._prefixes


def pairs_after(shared: int, context: int) -> tuple[float, int]:
    rest = context - shared
    one = rest * shared + rest * (rest + 1) / 2
    return context * (context + 1) / 2 + 3 * one, 4 * context


def test_an_abort_gives_whole_steps_and_frees_everything() -> None:
    replica = Replica(COSTS, Bounds(8, 4096, 1000))
    replica.add(0.0, [Arrival(1, 100, 500), Arrival(2, 100, 500)])
    replica.advance(1.0)
    now = 1.0
    before = replica.progress(now)
    assert before[1] == before[2] > 10
    assert replica.abort(now, [1, 99]) == [(1, before[1], 99 + before[1])]
    assert replica.sequences == 1
    assert replica.abort(now, [2]) == [(2, before[2], 99 + before[2])]
    assert (replica.sequences, replica._free, replica.next_s()) == (0, 1000, None)
    assert replica.abort(now, [2]) == []


@settings(max_examples=150, deadline=None)
@given(workloads(), st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 24)), max_size=6))
def test_aborts_lose_nothing_but_the_step_under_way(
    drawn: tuple[Bounds, list[Moment]], aborts: list[tuple[float, int]]
) -> None:
    """Every sequence ends once or is aborted once, with at most its tokens; all memory comes back."""
    bounds, arrivals = drawn
    replica, left = Replica(COSTS, bounds), {}
    moments = sorted(
        [*((a[0], 0, a) for a in arrivals), *((t, 1, n) for t, n in aborts)], key=lambda m: m[:2]
    )
    lengths = {number: remaining for _, number, _, remaining, _ in arrivals}
    for when, kind, what in moments:
        left.update({end.id: end.generated for end in replica.advance(when)})
        if kind == 0:
            _, number, context, remaining, held = what
            replica.add(when, [Arrival(number, context, remaining, number % 3, context // 2, held)])
        else:
            for number, generated, cached in replica.abort(when, [what]):
                assert 0 <= generated < lengths[number]
                assert 0 <= cached <= 300 + generated
                assert number not in left
                left[number] = generated
    while (following := replica.next_s()) is not None:
        for end in replica.advance(following):
            assert end.generated == lengths[end.id]
            left[end.id] = end.generated
    assert set(left) == set(lengths)
    assert replica._free == bounds.blocks
    assert not replica._prefixes


def test_a_cache_that_is_brought_along_is_not_read_in_again() -> None:
    replica = Replica(COSTS, Bounds(8, 4096, 1000))
    replica.add(0.0, [Arrival(1, 1000, 50, held=999)])
    assert replica.next_s() == pytest.approx(COSTS.mixed_s(0, 0, 1, 1000, 1000, 1))
    replica.advance(replica.next_s() or 0.0)
    assert replica._free == 1000 - -(-1000 // BLOCK)
    assert replica.abort(replica._time, [1]) == [(1, 1, 1000)]
    assert replica._free == 1000


class NeverAhead(Replica):
    """Takes each step boundary as an event of its own."""

    def _look_ahead(self) -> None:
        pass


def history(seed: int, replicas: list[Replica]) -> None:
    """The same random arrivals, aborts and questions for all, with gaps below and above a step of 5 ms."""
    rng, when, seen = random.Random(seed), 0.0, 0
    for _ in range(40):
        when += rng.choice([0.0, 0.0, 0.001, 0.002, 0.004, 0.3])
        assert_equal([replica.advance(when) for replica in replicas])
        number, what = rng.randrange(1, 12), rng.choice(["add", "add", "add", "abort", "progress"])
        if what == "add":
            seen += 1
            arrival = Arrival(seen, 20 + 5 * number, 1 + 3 * number, number % 3, 10 + number)
            for replica in replicas:
                replica.add(when, [arrival])
        elif what == "abort":
            gone = rng.randrange(max(1, seen - 8), seen + 2)
            assert_equal([replica.abort(when, [gone]) for replica in replicas])
        else:
            assert_equal([replica.progress(when) for replica in replicas])
        assert_equal([replica.kv_tokens(when) for replica in replicas])
    assert_equal([replica.advance(1e6) for replica in replicas])
    assert_equal([replica.preemptions for replica in replicas])


def assert_equal(values: list[Any]) -> None:
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("part", range(10))
def test_looking_ahead_changes_nothing(part: int) -> None:
    for seed in range(120 * part, 120 * (part + 1)):
        bounds = Bounds(8, (16, 64, 2048)[seed % 3], 25 + seed % 96)
        history(seed, [NeverAhead(COSTS, bounds), Replica(COSTS, bounds)])


@pytest.mark.parametrize("system", SYSTEMS)
def test_looking_ahead_changes_no_run(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs, with what the scheduler and the planner are told meanwhile."""
    spec = small_spec(system, "dense-9b", steps=2, settings=("workload.prompts=64",))
    ahead = simulate(spec)[0].events
    monkeypatch.setattr(Replica, "_look_ahead", NeverAhead._look_ahead)
    assert simulate(spec)[0].events == ahead

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from systems.scheduler import Load, Move, Waiting, assign, has_room, marginal_gain, rebalance
from systems.types import Speed

SPEED = Speed(a=1e-7, b=5e-3, c=1e-4, d=1e-3, max_running=64, kv_capacity_tokens=100_000)

loads = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(0, 120_000)), min_size=1, max_size=6
).map(lambda rows: [Load(epoch, version, n, kv if n else 0) for epoch, (version, n, kv) in enumerate(rows)])
queue = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4000)), max_size=60).map(
    lambda rows: [Waiting(i, version, context) for i, (version, context) in enumerate(sorted(rows))]
)


@given(queue, loads)
def test_assignments_are_legal_and_in_queue_order(waiting: list[Waiting], replicas: list[Load]) -> None:
    placed = assign(waiting, replicas, SPEED, growth_tokens=500)
    assert [sequence for sequence, _ in placed] == [item.id for item in waiting[: len(placed)]]
    current = {load.epoch: load for load in replicas}
    for sequence, epoch in placed:
        item = waiting[sequence]
        assert current[epoch].version >= item.min_version
        load = current[epoch]
        expected = load.kv_tokens + item.context_tokens + 500 * (load.running + 1)
        assert load.running == 0 or expected <= SPEED.kv_capacity_tokens
        assert load.running < SPEED.max_running + SPEED.ahead
        current[epoch] = current[epoch].plus(1, item.context_tokens)


@given(st.integers(1, 200), st.integers(1, 6))
def test_equal_replicas_are_filled_evenly(count: int, replicas: int) -> None:
    empty = [Load(epoch, 0, 0, 0) for epoch in range(replicas)]
    placed = assign([Waiting(i, 0, 100) for i in range(count)], empty, SPEED, growth_tokens=0)
    share = [sum(epoch == one for _, epoch in placed) for one in range(replicas)]
    assert max(share) - min(share) <= 1
    assert len(placed) == min(count, replicas * (SPEED.max_running + SPEED.ahead))


def test_room_counts_the_growth_of_the_newcomer_too() -> None:
    nearly = Load(0, 0, 1, 98_000)  # one sequence; with the newcomer two of them grow
    assert has_room(nearly, SPEED, 1_000, growth_tokens=500)
    assert not has_room(nearly, SPEED, 1_001, growth_tokens=500)
    full = Load(0, 0, SPEED.max_running + SPEED.ahead, 0)
    assert not has_room(full, SPEED, 1, growth_tokens=0)
    assert has_room(Load(0, 0, full.running - 1, 0), SPEED, 1, growth_tokens=0)


def test_one_more_sequence_gains_what_the_throughput_model_says_and_nothing_behind_a_full_batch() -> None:
    load = Load(0, 0, 9, 9_000)
    more = 10 / SPEED.itl_s(10, 10_000) - 9 / SPEED.itl_s(9, 9_000)
    assert abs(marginal_gain(load, SPEED, 1_000) - more) < 1e-9
    assert abs(marginal_gain(Load(0, 0, 0, 0), SPEED, 1_000) - 1 / SPEED.itl_s(1, 1_000)) < 1e-9
    assert marginal_gain(Load(0, 0, SPEED.max_running, 0), SPEED, 1_000) == 0.0
    assert marginal_gain(Load(0, 0, SPEED.max_running - 1, 630), SPEED, 10) > 0.0


def test_an_older_replica_and_an_emptier_one_go_first_where_the_gain_is_equal() -> None:
    flat = replace(SPEED, a=0.0, b=0.25, c=0.0, d=0.25)  # halves, so that equal gains are equal to the bit
    placed = assign([Waiting(i, 0, 1) for i in range(5)], [Load(3, 0, 2, 2), Load(1, 0, 2, 2)], flat, 0)
    assert [epoch for _, epoch in placed] == [1, 3, 1, 3, 1]


def test_a_sequence_never_goes_back_to_an_older_version() -> None:
    replicas = [Load(0, 1, 0, 0), Load(1, 2, 50, 5_000)]
    assert assign([Waiting(0, 2, 10), Waiting(1, 1, 10)], replicas, SPEED, 0) == [(0, 1), (1, 0)]


def test_an_empty_replica_takes_a_sequence_of_any_size() -> None:
    huge = Waiting(0, 0, 10 * SPEED.kv_capacity_tokens)
    assert assign([huge], [Load(0, 0, 0, 0)], SPEED, growth_tokens=0) == [(0, 0)]


def lopsided(draw: st.DrawFn) -> list[Load]:
    """Some full replicas and some empty ones: something is to be moved."""
    full = draw(st.integers(1, 4))
    empty = draw(st.integers(1, 4))
    counts = [draw(st.integers(40, 70)) for _ in range(full)] + [
        draw(st.integers(0, 4)) for _ in range(empty)
    ]
    return [Load(epoch, 0, n, n * draw(st.integers(10, 500))) for epoch, n in enumerate(counts)]


@given(st.composite(lopsided)())
def test_rebalance_moves_where_it_pays_and_brings_counts_together(replicas: list[Load]) -> None:
    bound_by_compute = replace(SPEED, b=0.0, kv_capacity_tokens=10**9)
    moves = rebalance(replicas, bound_by_compute, remaining_tokens=20_000, reprefill_s=0.001)
    assert moves, "a full replica beside an empty one, long sequences and a cheap re-prefill"
    current = {load.epoch: load for load in replicas}
    for move in moves:
        source, target = current[move.source], current[move.target]
        assert move.count == (source.running - target.running) // 2 >= 1
        assert source.running == max(load.running for load in current.values())
        assert target.running == min(load.running for load in current.values())
        mean = source.kv_tokens / source.running
        current[move.source], current[move.target] = (
            source.plus(-move.count, mean),
            target.plus(move.count, mean),
        )
    assert sum(load.running for load in current.values()) == sum(load.running for load in replicas)


def test_rebalance_pays_exactly_above_the_price_of_reading_again() -> None:
    """60 sequences beside none, without a cost of context: 30 move if the gain exceeds 30 re-prefills."""
    speed = replace(SPEED, a=0.0)
    loads = [Load(0, 0, 60, 6_000), Load(1, 0, 0, 0)]
    gain = 2 * 30 / speed.itl_s(30, 0) - 60 / speed.itl_s(60, 0)
    itl = speed.itl_s(30, 0)
    breaks_even_s = gain * 500 * itl * itl / 30
    assert rebalance(loads, speed, 500, breaks_even_s * 0.999) == [Move(0, 1, 30)]
    assert rebalance(loads, speed, 500, breaks_even_s * 1.001) == []


def test_rebalance_leaves_replicas_of_an_older_version_and_full_caches_alone() -> None:
    loads = [Load(0, 2, 60, 6_000), Load(1, 1, 0, 0)]
    assert rebalance(loads, SPEED, 20_000, 0.01) == []
    heavy = [Load(0, 0, 60, 90_000), Load(1, 0, 0, 80_000)]
    assert rebalance(heavy, SPEED, 20_000, 0.01) == []


@given(loads)
def test_rebalance_never_overdraws_and_never_inverts(replicas: list[Load]) -> None:
    current = {load.epoch: load for load in replicas}
    for move in rebalance(replicas, SPEED, remaining_tokens=2000, reprefill_s=0.1):
        source, target = current[move.source], current[move.target]
        assert 1 <= move.count <= source.running
        assert target.version >= source.version
        after = source.running - move.count, target.running + move.count
        assert abs(after[0] - after[1]) <= abs(source.running - target.running)
        current[move.source] = source.plus(-move.count, source.kv_tokens / source.running)
        current[move.target] = target.plus(move.count, source.kv_tokens / source.running)


def test_rebalance_does_not_pay_where_there_is_no_compute_limit() -> None:
    """Below the knee a replica is as fast with all sequences as with half of them: moving only costs."""
    assert rebalance([Load(0, 0, 8, 8e3), Load(1, 0, 0, 0)], SPEED, 100, reprefill_s=1.0) == []

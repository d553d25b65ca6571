from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from systems.scheduler import Load, Move, Waiting, assign, has_room, rebalance, served_after, take_turns
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


@given(st.lists(st.integers(1, 17_000), max_size=400), st.integers(1, 8), st.integers(0, 4000))
def test_predicted_latencies_end_within_one_sequence_of_each_other(
    contexts: list[int], replicas: int, growth: int
) -> None:
    """Whatever the contexts and their order: no replica is slower than another with one sequence more."""
    room = replace(SPEED, kv_capacity_tokens=10**9, max_running=10**6)
    placed = assign(
        [Waiting(i, 0, c) for i, c in enumerate(contexts)], [Load(e, 0, 0, 0) for e in range(replicas)],
        room, growth,
    )  # fmt: skip
    current = {epoch: Load(epoch, 0, 0, 0.0) for epoch in range(replicas)}
    for sequence, epoch in placed:
        current[epoch] = current[epoch].plus(1, contexts[sequence])
    longest = max(contexts, default=0)
    slowest = max(room.itl_s(load.running, load.kv_tokens) for load in current.values())
    for load in current.values():
        assert room.itl_s(load.running + 1, load.kv_tokens + longest) >= slowest - 1e-12


def test_the_longest_contexts_do_not_pile_up_on_one_replica() -> None:
    """A queue sorted by context, because short answers finish first, on 16 equal replicas of a 9B judge."""
    speed = Speed(3.2e-8, 4.4e-4, 5.5e-5, 8e-3, 256, 2_000_000)
    contexts = [500 + 8 * i for i in range(2048)]
    for order in (contexts, contexts[::-1]):
        waiting = [Waiting(i, 0, context) for i, context in enumerate(order)]
        placed = assign(waiting, [Load(e, 0, 0, 0.0) for e in range(16)], speed, 2000)
        assert len(placed) == 2048
        kv, count = [0] * 16, [0] * 16
        for sequence, epoch in placed:
            kv[epoch] += order[sequence]
            count[epoch] += 1
        itl = [speed.itl_s(n, held) for n, held in zip(count, kv, strict=True)]
        assert max(itl) / min(itl) < 1.03
        assert max(kv) / min(kv) < 1.2


def test_a_place_in_the_batch_comes_before_any_latency() -> None:
    """Behind a full batch of short contexts a sequence waits; among long ones it is served."""
    full, long = Load(0, 0, SPEED.max_running, 64), Load(1, 0, 10, 60_000)
    assert served_after(long, SPEED) < served_after(full, SPEED)
    assert assign([Waiting(0, 0, 10)], [full, long], SPEED, 0) == [(0, 1)]


def test_long_contexts_repel() -> None:
    short, long = Load(0, 0, 20, 2_000), Load(1, 0, 20, 80_000)
    assert assign([Waiting(0, 0, 10)], [long, short], SPEED, 0) == [(0, 0)]


def test_an_older_replica_and_an_emptier_one_go_first_where_latencies_are_equal() -> None:
    flat = replace(
        SPEED, a=0.0, b=0.25, c=0.0, d=0.25
    )  # halves, so that equal latencies are equal to the bit
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
def test_rebalance_moves_where_it_pays_from_the_slowest_to_the_fastest(replicas: list[Load]) -> None:
    speed = replace(SPEED, b=0.0, kv_capacity_tokens=10**9)  # bound by compute
    moves = rebalance(replicas, speed, remaining_tokens=20_000, reprefill_s=0.001)
    assert moves, "a full replica beside an empty one, long sequences and a cheap re-prefill"
    current = {load.epoch: load for load in replicas}
    for move in moves:
        source, target = current[move.source], current[move.target]
        assert 1 <= move.count <= (source.running - target.running) // 2
        assert served_after(source, speed) == max(served_after(load, speed) for load in current.values())
        assert served_after(target, speed) == min(served_after(load, speed) for load in current.values())
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


def test_taking_turns_goes_on_after_the_last_and_skips_who_has_no_room() -> None:
    loads = [
        Load(0, 0, 3, 300),
        Load(1, 0, SPEED.max_running + SPEED.ahead, 0),
        Load(2, 0, 50, 900),
        Load(3, 1, 0, 0),
    ]
    placed = take_turns([Waiting(i, 0, 10) for i in range(5)], loads, SPEED, 0, last=2)
    assert [epoch for _, epoch in placed] == [3, 0, 2, 3, 0]
    assert take_turns([Waiting(0, 1, 10)], loads, SPEED, 0, last=-1) == [(0, 3)]
    assert take_turns([Waiting(0, 2, 10)], loads, SPEED, 0, last=-1) == []

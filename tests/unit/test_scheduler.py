from hypothesis import given
from hypothesis import strategies as st

from systems.scheduler import Load, Waiting, assign, has_room, rebalance
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
        assert has_room(current[epoch], SPEED, item.context_tokens, 500)
        current[epoch] = current[epoch].plus(1, item.context_tokens)


@given(st.integers(1, 200), st.integers(1, 6))
def test_equal_replicas_are_filled_evenly(count: int, replicas: int) -> None:
    empty = [Load(epoch, 0, 0, 0) for epoch in range(replicas)]
    placed = assign([Waiting(i, 0, 100) for i in range(count)], empty, SPEED, growth_tokens=0)
    share = [sum(epoch == one for _, epoch in placed) for one in range(replicas)]
    assert max(share) - min(share) <= 1
    assert len(placed) == min(count, replicas * (SPEED.max_running + SPEED.ahead))


def test_an_empty_replica_takes_a_sequence_of_any_size() -> None:
    huge = Waiting(0, 0, 10 * SPEED.kv_capacity_tokens)
    assert assign([huge], [Load(0, 0, 0, 0)], SPEED, growth_tokens=0) == [(0, 0)]


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

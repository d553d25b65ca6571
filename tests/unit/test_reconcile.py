from hypothesis import given
from hypothesis import strategies as st

from systems.policies.layouts import place_blocks
from systems.reconcile import reconcile
from systems.types import Device, Layout, Placement, Plan, Role

LAYOUT = Layout(
    devices=tuple(Device(i, i // 8, "h20") for i in range(16)),
    width={Role.ROLLOUT: 1, Role.REWARD: 4, Role.TRAIN: 1},
    template={Role.TRAIN: 8, Role.ROLLOUT: 4, Role.REWARD: 4},
    train_min=4,
)
roles = st.lists(st.sampled_from(list(Role)), min_size=4, max_size=4).map(
    lambda listed: place_blocks(LAYOUT, listed)
)
devices = st.sets(st.integers(0, 15), max_size=4)


def carry_out(current: tuple[Placement, ...], shifts: tuple) -> tuple[Placement, ...]:  # type: ignore[type-arg]
    now = list(current)
    for shift in shifts:
        for source in shift.sources:
            now.remove(source)
        owned = {device for placement in now for device in placement.devices}
        for target in shift.targets:
            assert not owned & set(target.devices), "a target takes a device that somebody owns"
            now.append(target)
    return tuple(sorted(now))


@given(roles, roles)
def test_the_plan_is_reached_by_legal_shifts(now: tuple[Placement, ...], plan: tuple[Placement, ...]) -> None:
    shifts = reconcile(now, Plan(plan))
    assert carry_out(now, shifts) == plan
    seen: set[int] = set()
    for shift in shifts:
        assert not seen & set(shift.devices), "two shifts share a device"
        seen |= set(shift.devices)


@given(roles, roles, devices, devices)
def test_busy_and_down_devices_are_not_touched(
    now: tuple[Placement, ...], plan: tuple[Placement, ...], busy: set[int], down: set[int]
) -> None:
    for shift in reconcile(now, Plan(plan), busy=busy, down=down):
        assert not busy & set(shift.devices)
        assert not down & {device for target in shift.targets for device in target.devices}


@given(roles)
def test_nothing_to_do_is_nothing(now: tuple[Placement, ...]) -> None:
    assert reconcile(now, Plan(now)) == ()


def test_parts_are_as_small_as_shared_devices_allow() -> None:
    four = tuple(Placement(Role.ROLLOUT, (i,)) for i in range(4))
    one = (Placement(Role.REWARD, (0, 1, 2, 3)),)
    other = (Placement(Role.ROLLOUT, (8,)),)
    shifts = reconcile(four, Plan(one + other))
    assert [(s.sources, s.targets) for s in shifts] == [(four, one), ((), other)]


def test_the_training_unit_moves_in_one_shift() -> None:
    """Otherwise there would be two training units, or none, depending on which half is faster."""
    before = (Placement(Role.TRAIN, (0, 1)), Placement(Role.ROLLOUT, (4,)), Placement(Role.ROLLOUT, (5,)))
    after = (Placement(Role.ROLLOUT, (0,)), Placement(Role.ROLLOUT, (1,)), Placement(Role.TRAIN, (4, 5)))
    assert len(reconcile(before, Plan(tuple(sorted(after))))) == 1

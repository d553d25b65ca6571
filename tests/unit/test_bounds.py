import pytest

from systems.costs.bounds import Floor, SampleWork, ServingFloor, lower_bound_s
from systems.types import Role

ROLLOUT = ServingFloor(token_device_s=0.1, kv_device_s=0.001, token_s=1.0, kv_s=0.01)
REWARD = ServingFloor(token_device_s=0.2, kv_device_s=0.0, token_s=2.0, kv_s=0.0)
FLOOR = Floor(
    devices=4,
    serving={Role.ROLLOUT: ROLLOUT, Role.REWARD: REWARD},
    train_token_device_s=0.4,
    train_step_s=0.5,
)


def test_chain_of_one_sample_by_hand() -> None:
    one = SampleWork(admitted_version=0, prompt=10, response=3, judge_prompt=13, judgements=(2, 4))
    alone = 3 * 1.0 + (3 * 10 + 3) * 0.01 + 4 * 2.0  # the slowest judgement counts
    train = 13 * 0.4 / 4 + 0.5
    assert lower_bound_s([[one]], FLOOR) == pytest.approx(alone + train)


def test_steps_in_flight_overlap_down_to_the_training_chain() -> None:
    fresh = SampleWork(0, 10, 3, 13, (4,))
    two = lower_bound_s([[fresh], [fresh]], FLOOR)
    one = lower_bound_s([[fresh]], FLOOR)
    assert two == pytest.approx(one + 13 * 0.4 / 4 + 0.5)  # admitted together: only training repeats


def test_at_staleness_0_steps_add_up() -> None:
    steps = [[SampleWork(version, 10, 3, 13, (4,))] for version in range(3)]
    assert lower_bound_s(steps, FLOOR) == pytest.approx(3 * lower_bound_s(steps[:1], FLOOR))


def test_much_work_on_few_devices_is_bound_by_work() -> None:
    batch = [SampleWork(0, 0, 10, 0, (10,)) for _ in range(1000)]
    device_s = 1000 * (10 * 0.1 + 45 * 0.001 + 10 * 0.2 + 10 * 0.4)
    assert lower_bound_s([batch], FLOOR) == pytest.approx(device_s / 4)


def test_no_steps_take_no_time() -> None:
    assert lower_bound_s([], FLOOR) == 0.0

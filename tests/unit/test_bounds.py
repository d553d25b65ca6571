import pytest

from harness.runs.costs import modelled
from systems.costs.bounds import Floor, Price, RoleWork, SampleWork, ServingFloor, least, lower_bound_s
from systems.types import SERVING, Role
from workloads.groups import load_group

ROLLOUT = ServingFloor((Price(0.1, 0.0),), kv_device_s=0.001, token_s=1.0, kv_s=0.01)
REWARD = ServingFloor((Price(0.2, 0.0),), kv_device_s=0.0, token_s=2.0, kv_s=0.0)
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


def test_prompts_are_read_once_a_group_and_at_the_price_that_suits_a_run() -> None:
    floor = ServingFloor((Price(0.10, 0.0), Price(0.08, 0.05)), 0.0, 1.0, 0.0, read_s=0.01)
    assert floor.device_s(RoleWork(generated=100, read=10)) == pytest.approx(10.0)
    assert floor.device_s(RoleWork(generated=100, read=100)) == pytest.approx(13.0)
    assert floor.latency_s(10, 2) == pytest.approx(0.1 + 2.0)


def test_attention_in_training_grows_with_the_square_of_a_sequence() -> None:
    floor = Floor(4, FLOOR.serving, 0.4, 0.5, train_pair_device_s=0.01)
    sample = SampleWork(0, 10, 3, 13, (4,))
    assert floor.train_device_s([sample]) == pytest.approx(13 * 0.4 + 13 * 14 / 2 * 0.01)


def test_the_parts_of_the_work_are_the_work() -> None:
    batch = [SampleWork(0, 0, 10, 5, (10,), 0) for _ in range(100)]
    found = least([batch], FLOOR)
    assert found.work_s == pytest.approx(sum(found.device_s.values()) / 4)
    assert found.bound_s == max(found.work_s, found.chain_s)


@pytest.mark.parametrize("name", ["dense-9b", "moe-122b", "moe-30b-policy"])
def test_no_step_of_an_engine_is_cheaper_than_its_prices_say(name: str) -> None:
    cost = modelled(load_group(name), real=False)
    for role in SERVING:
        one = cost.serving[role]
        costs, scale = one.costs(), one.token_scale
        for generated, read in one.prices():
            for n in (0, 1, 8, 33, 100, 256):
                if n:
                    assert costs.alpha_s(n) >= generated / scale * n * (1 - 1e-9)
                for queries in (1, 16, 31, 200, 4096, 8192 - n):
                    step_s = costs.mixed_s(n, 0.0, queries, 0.0, queries, 0)
                    assert step_s >= (n * generated + queries * read) / scale * (1 - 1e-9)
        assert max(read for _, read in one.prices()) > 0.0

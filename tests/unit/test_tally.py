"""What a summary says of a log that can be added up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.summary import Caps, Tally
from systems.events import decode
from systems.policies import SYSTEMS
from systems.types import Role
from tests.conftest import SMALL, simulate, small_spec

S = 1_000_000_000  # nanoseconds
FLOOR = {
    "devices": 4,
    "serving": {
        role: {"token_device_s": 0.001, "kv_device_s": 0.0, "token_s": 0.001, "kv_s": 0.0}
        for role in (Role.ROLLOUT, Role.REWARD)
    },
    "train_token_device_s": 0.001,
    "train_step_s": 0.5,
}


class Written:
    """A log of one group of two samples an RL step, on a cluster of four devices."""

    def __init__(self, caps: Caps | None = None, **began: Any) -> None:
        self.spent: list[tuple[tuple[int, ...], str, int, int]] = []
        self.tally = Tally(spent=lambda *spent: self.spent.append(spent), caps=caps)
        facts = {
            "kind_of_numbers": "simulated", "system": "x", "model": "m", "policy": "p", "judge": "j",
            "seed": 0, "gpus": 4, "staleness_bound": 2, "token_scale": 1, "samples_per_group": 2,
            "judge_calls": 1, "floor": FLOOR, "schema": 1, "extrapolated": False, "steps": 1,
            "publishing": "interrupt", "template": {},
        }  # fmt: skip
        self.add(0, "run.began", **{**facts, **began})

    def add(self, at_s: float, kind: str, **fields: Any) -> None:
        self.tally.add(decode({"t": round(at_s * S), "kind": kind, **fields}))

    def lease(self, at_s: float, lease: int, role: str, state: str, *devices: int) -> None:
        self.add(at_s, "lease", lease=lease, role=role, state=state, devices=list(devices))

    def start(self, at_s: float, sequence: int, role: str, lease: int, context: int = 10) -> None:
        facts = {"sequence": sequence, "role": role, "lease": lease, "context": context, "resumed": 0}
        self.add(at_s, "sequence.dispatched", **facts)

    def finish(self, at_s: float, sequence: int, role: str, lease: int, tokens: int, **more: Any) -> None:
        facts = {"sequence": sequence, "role": role, "lease": lease, "tokens": tokens, "segments": 1}
        self.add(at_s, "sequence.finished", **{"oldest": 0, **facts, **more})

    def nothing_much(self, at_s: float) -> None:
        """A group of empty samples."""
        self.add(at_s, "batch.admitted", batch=0, version=0, groups=[0, 0])
        for sample in (0, 1):
            self.add(at_s, "sample.scored", sample=sample, reward=None, true=None)

    def train(self, taken: float, began: float, ended: float, step: int, group: int, lease: int = 2) -> None:
        self.add(taken, "batch.taken", step=step, groups=[group])
        self.add(began, "train.began", step=step, lease=lease)
        self.add(ended, "train.ended", step=step, lease=lease)
        self.add(ended, "version.published", version=step + 1, stats=[{"a": 1.0}, {"a": 3.0}])


def one_step(caps: Caps | None = None, **more: Any) -> Written:
    """Responses of 10 and 30 tokens, judgements of 20 and 40, and 4 s of training on one device."""
    log = Written(caps)
    for lease, role, devices in ((0, "rollout", (0, 1)), (1, "reward", (2,)), (2, "train", (3,))):
        log.lease(0, lease, role, "active", *devices)
    log.add(0, "batch.admitted", batch=0, version=0, groups=[0, 0])
    log.start(0, 0, "rollout", 0)
    log.start(0, 2, "rollout", 0)
    log.finish(5, 0, "rollout", 0, 10, **more)
    log.start(5, 1, "reward", 1, context=20)
    log.finish(8, 1, "reward", 1, 20, oldest=-1)
    log.add(8, "sample.scored", sample=0, reward=1.0, true=1.0)
    log.finish(10, 2, "rollout", 0, 30, **more)
    log.start(10, 3, "reward", 1, context=40)
    log.finish(16, 3, "reward", 1, 40, oldest=-1)
    log.add(16, "sample.scored", sample=1, reward=0.0, true=1.0)
    log.train(16, 17, 21, 0, 0)
    return log


def test_a_step_adds_up() -> None:
    (step,) = one_step().tally.steps
    expected = {
        "step": 0, "step_s": 21.0, "reward": 0.5, "true_accuracy": 1.0, "response_tokens_mean": 20.0,
        "response_tokens_max": 30, "judge_tokens_mean": 30.0, "policy_tokens": 40, "judge_tokens": 60,
        "responses": 2, "judgements": 2, "responses_truncated": None, "judgements_truncated": None,
        "verdicts_unparsable": None, "unparsable_truncated": None, "staleness_mean": 0.0, "staleness_max": 0,
        "wait_for_batch_s": 16.0, "wait_for_trainer_s": 1.0, "gen_s": 10.0, "reward_s": 9.0, "train_s": 4.0,
        "published_s": 21.0, "learn_a": 2.0,
    }  # fmt: skip
    assert step == pytest.approx(expected)


def test_a_summary_adds_up() -> None:
    summary = one_step().tally.summary()
    assert summary["makespan_s"] == 21.0
    assert summary["tokens_per_s"] == pytest.approx(
        {"policy": 40 / 21, "judge": 60 / 21, "total": 100 / 21, "total_per_gpu": 100 / 21 / 4}
    )
    shares = {"rollout": 2 * 10 / 84, "reward": 9 / 84, "train": 4 / 84, "shifting": 0.0}
    assert summary["gpu_time_share"] == pytest.approx({**shares, "idle": 1 - sum(shares.values())})
    assert summary["step_s_mean"] == 21.0
    assert summary["realised_staleness"] == {"max": 0, "mean": 0.0}
    chain = 0.030 + 0.040 + (20 + 40) * 0.001 / 4 + 0.5
    assert summary["lower_bound_s"] == pytest.approx(chain)


def test_intervals_are_those_in_which_devices_worked() -> None:
    spent = one_step().spent
    assert ((0, 1), "rollout", 0, 10 * S) in spent
    assert [(s, t) for devices, share, s, t in spent if share == "reward"] == [
        (5 * S, 8 * S),
        (10 * S, 16 * S),
    ]
    assert ((3,), "train", 17 * S, 21 * S) in spent


def test_staleness_counts_from_the_oldest_token() -> None:
    """Admitted at version 0, first token at version 1, trained on at version 2."""
    log = Written()
    log.lease(0, 2, "train", "active", 3)
    log.lease(0, 0, "rollout", "active", 0)
    for group in (0, 1, 2):
        log.add(0, "batch.admitted", batch=group, version=0, groups=[group, group])
        for sample in (2 * group, 2 * group + 1):
            log.start(group, 2 * sample, "rollout", 0)
            log.finish(group, 2 * sample, "rollout", 0, 10, oldest=1 if group == 2 else 0)
        log.train(group, group, 1 + group, group, group)
    assert [step["staleness_max"] for step in log.tally.steps] == [0, 1, 1]
    assert log.tally.summary()["realised_staleness"] == {"max": 1, "mean": pytest.approx(2 / 3)}


def test_what_reaches_a_cap_was_cut_off() -> None:
    summary = one_step(Caps(response=30, judgement=20)).tally.summary()
    assert {key: summary["steps"][0][key] for key in ("responses_truncated", "judgements_truncated")} == {
        "responses_truncated": 1, "judgements_truncated": 2,
    }  # fmt: skip
    assert summary["cut_off"]["judgements"] == 2
    assert summary["warnings"] == [
        "50.0% of 2 responses were cut off at their cap", "100.0% of 2 judgements were cut off at their cap",
    ]  # fmt: skip


def test_text_says_itself_whether_it_was_cut_off() -> None:
    log = one_step(Caps(response=1, judgement=1), end="stop")
    assert log.tally.steps[0]["responses_truncated"] == 0
    assert one_step(end="length").tally.steps[0]["responses_truncated"] == 2


def test_judgements_without_a_verdict_are_counted_with_those_that_were_cut_off() -> None:
    log = Written()
    log.lease(0, 2, "train", "active", 3)
    log.lease(0, 1, "reward", "active", 0)
    log.add(0, "batch.admitted", batch=0, version=0, groups=[0, 0])
    for sequence, end in ((1, "length"), (3, "stop")):
        log.start(0, sequence, "reward", 1)
        log.finish(0, sequence, "reward", 1, 5, end=end, oldest=-1)
    log.add(1, "sample.scored", sample=0, reward=0.0, true=1.0, unparsable=[1])
    log.add(1, "sample.scored", sample=1, reward=0.0, true=1.0, unparsable=[3])
    log.train(1, 1, 2, 0, 0)
    (step,) = log.tally.steps
    assert (step["verdicts_unparsable"], step["unparsable_truncated"], step["judgements_truncated"]) == (
        2,
        1,
        1,
    )


# ------------------------------------------------------------------------------- moving


@pytest.mark.parametrize(
    ("why", "to", "resumed", "counts"),
    [("shift", 5, 4, 1), ("rebalance", 5, 4, 1), ("shift", 0, 4, 0), ("shift", 5, 0, 0), ("publish", 5, 4, 0),
     ("loss", 5, 4, 0)],
)  # fmt: skip
def test_a_migration_is_a_sequence_with_tokens_that_goes_on_elsewhere(
    why: str, to: int, resumed: int, counts: int
) -> None:
    log = Written()
    log.lease(0, 0, "rollout", "active", 0)
    log.lease(0, 5, "rollout", "active", 1)
    log.add(0, "sequence.dispatched", sequence=0, role="rollout", lease=0, context=10, resumed=0)
    log.add(1, "sequence.requeued", sequence=0, role="rollout", lease=0, why=why, tokens=resumed)
    log.add(1, "sequence.dispatched", sequence=0, role="rollout", lease=to, context=14, resumed=resumed)
    assert log.tally.migrations == counts


def test_shifting_time_is_from_the_end_of_a_drain_to_ready() -> None:
    log = Written()
    log.lease(0, 2, "train", "active", 3)
    for shift, sources in ((0, [["rollout", [0, 1]]]), (1, [])):
        log.add(
            1, "shift.began", shift=shift, how="migrate", sources=sources, targets=[["reward", [1 + shift]]]
        )
    for at, phase in ((3, "drain"), (3, "park"), (4, "release"), (8, "load"), (9, "warm"), (9, "ready")):
        log.add(at, "shift.phase", shift=0, phase=phase, bytes=0)
    log.add(9, "shift.ended", shift=0, ok=True)
    log.add(2, "shift.phase", shift=1, phase="drain", bytes=0)
    log.add(5, "shift.ended", shift=1, ok=False)
    log.add(10, "device.lost", device=1, why="")
    log.nothing_much(0)
    log.train(10, 10, 20, 0, 0)
    summary = log.tally.summary()
    assert (summary["shifts"], summary["failed_shifts"], summary["device_losses"]) == (1, 1, 1)
    assert summary["gpu_time_share"]["shifting"] == pytest.approx((2 * 6 + 1 * 3) / 80)
    phases = {name: (facts["mean_s"], facts["device_s"]) for name, facts in summary["shift_phases"].items()}
    assert phases == {"drain": (1.5, 5.0), "release": (1.0, 2.0), "load": (4.0, 8.0), "warm": (1.0, 2.0)}


def test_loading_a_version_is_shifting_and_a_lost_replica_works_no_more() -> None:
    log = Written()
    log.lease(0, 0, "rollout", "active", 0)
    log.lease(0, 2, "train", "active", 3)
    log.nothing_much(0)
    log.add(0, "lease.updating", lease=0, version=1)
    log.add(2, "lease.updated", lease=0, version=1)
    log.add(2, "sequence.dispatched", sequence=0, role="rollout", lease=0, context=10, resumed=0)
    log.lease(5, 0, "rollout", "lost", 0)
    log.add(5, "sequence.requeued", sequence=0, role="rollout", lease=0, why="loss", tokens=0)
    log.add(5, "train.began", step=0, lease=2)
    log.add(7, "train.lost", step=0, why="")
    log.train(7, 8, 10, 0, 0)
    shares = log.tally.summary()["gpu_time_share"]
    assert shares == pytest.approx(
        {"rollout": 3 / 40, "reward": 0.0, "train": 4 / 40, "shifting": 2 / 40, "idle": 31 / 40}
    )


def test_time_after_the_last_publish_does_not_count() -> None:
    log = one_step()
    before = log.tally.summary()
    log.add(30, "sequence.dispatched", sequence=4, role="rollout", lease=0, context=10, resumed=0)
    log.add(99, "sequence.finished", sequence=4, role="rollout", lease=0, tokens=5, oldest=0, segments=1)
    assert log.tally.summary() == before


def test_a_second_step_counts_from_the_first_publish() -> None:
    log = one_step()
    log.add(21, "batch.admitted", batch=1, version=1, groups=[1, 1])
    log.start(23, 4, "rollout", 0)
    log.finish(26, 4, "rollout", 0, 10, oldest=1)
    log.start(26, 6, "rollout", 0)
    log.finish(33, 6, "rollout", 0, 10, oldest=1)
    log.start(30, 5, "reward", 1)
    log.finish(35, 5, "reward", 1, 5, oldest=-1)
    log.train(36, 38, 41, 1, 1)
    step = log.tally.steps[1]
    assert (step["step"], step["step_s"], step["published_s"]) == (1, 20.0, 41.0)
    assert (step["wait_for_batch_s"], step["wait_for_trainer_s"], step["train_s"]) == (15.0, 2.0, 3.0)
    assert (step["gen_s"], step["reward_s"]) == (10.0, 5.0)
    assert log.tally.summary()["makespan_s"] == 41.0


def test_a_prompt_is_what_was_not_generated_before() -> None:
    """A sequence that goes on elsewhere has its own tokens in its context; they are no prompt."""

    def bound(context: int, resumed: int) -> float:
        log = Written()
        log.lease(0, 0, "rollout", "active", 0)
        log.lease(0, 2, "train", "active", 3)
        log.nothing_much(0)
        facts = {"sequence": 0, "role": "rollout", "lease": 0, "context": context, "resumed": resumed}
        log.add(0, "sequence.dispatched", **facts)
        log.train(1, 1, 2, 0, 0)
        bound_s: float = log.tally.summary()["lower_bound_s"]
        return bound_s

    assert bound(13, 6) == bound(7, 0) != bound(13, 0)


def test_a_replica_that_is_lost_while_it_loads_a_version_works_for_nobody() -> None:
    log = Written()
    log.lease(0, 0, "rollout", "active", 0)
    log.lease(0, 2, "train", "active", 3)
    log.nothing_much(0)
    log.add(1, "lease.updating", lease=0, version=1)
    log.lease(3, 0, "rollout", "lost", 0)
    log.train(9, 9, 10, 0, 0)
    assert log.tally.summary()["gpu_time_share"]["shifting"] == pytest.approx(2 / 40)


def test_a_drain_that_takes_no_time_counts_and_other_phases_do_not() -> None:
    log = Written()
    log.lease(0, 2, "train", "active", 3)
    log.nothing_much(0)
    log.add(1, "shift.began", shift=0, how="migrate", sources=[["rollout", [0]]], targets=[["reward", [0]]])
    for at, phase in ((1, "drain"), (1, "park"), (4, "load")):
        log.add(at, "shift.phase", shift=0, phase=phase, bytes=0)
    log.add(4, "shift.ended", shift=0, ok=True)
    log.train(9, 9, 10, 0, 0)
    phases = log.tally.summary()["shift_phases"]
    assert phases == {"drain": {"mean_s": 0.0, "device_s": 0.0}, "load": {"mean_s": 3.0, "device_s": 3.0}}


def test_a_run_without_a_step_has_no_rates() -> None:
    summary = Written().tally.summary()
    assert summary["makespan_s"] == 0.0
    assert set(summary["tokens_per_s"].values()) == {0.0}
    assert summary["gpu_time_share"]["idle"] == 1.0
    assert summary["step_s_mean"] is None


def test_what_was_lost_sums_to_makespan_minus_bound() -> None:
    """Whatever happened: in runs of all systems, with losses."""
    for system in SYSTEMS:
        spec = small_spec(system, gpus=None, settings=(*SMALL, "faults.losses=2", "faults.within_s=60"))
        _, tally, _ = simulate(spec)
        summary = tally.summary()
        lost = (summary["makespan_s"] - summary["lower_bound_s"]) * summary["gpus"]
        assert sum(summary["loss"].values()) == pytest.approx(lost, rel=1e-9)
        assert min(part for cause, part in summary["loss"].items() if cause != "critical path") > -1e-6


def test_a_context_that_was_read_before_is_reading_again_but_for_what_is_cached() -> None:
    log = Written()
    log.lease(0, 0, "rollout", "active", 0)
    log.start(0, 0, "rollout", 0, context=10)
    log.add(1, "sequences.requeued", role="rollout", lease=0, why="shift", sequences=[0], tokens=[20])
    again = {"role": "rollout", "sequences": [0], "leases": [0], "contexts": [30], "resumed": [20]}
    log.add(1, "sequences.dispatched", **again, cached=[25])
    assert log.tally._spent_now().reread == {(Role.ROLLOUT, "shift"): 5}

"""Deterministic simulation testing: the real runtime under injected faults, many seeds."""

import random
from typing import Any

import pytest

from systems.backends.faults import Fault, FaultyBackend, Noise
from systems.policies import SYSTEMS
from systems.types import Role
from tests.conftest import MemoryLog, simulate, small_spec

SEEDS = 200
BLOCKS = 8  # tests that the seeds are spread over, so that a failure names a few of them
STEPS = 3


def faults_of(seed: int) -> Any:
    """A wrapper with this seed's losses, slow devices and noise on answers."""
    rng = random.Random(f"faults/{seed}")
    losses = tuple(sorted(Fault(rng.uniform(0, 400), rng.randrange(8)) for _ in range(rng.randrange(4))))
    noise = Noise(
        lost=rng.choice([0.0, 0.02]),
        doubled=rng.choice([0.0, 0.1]),
        late=rng.choice([0.0, 0.1]),
        failed_load=rng.choice([0.0, 0.1]),
    )
    slow = [(rng.randrange(8), rng.uniform(1.5, 4)) for _ in range(rng.randrange(3))]

    def wrap(backend: Any) -> FaultyBackend:
        for device, factor in slow:
            backend.slow(device, factor)
        return FaultyBackend(backend, losses, noise, seed)

    return wrap


def check(log: MemoryLog, staleness: int) -> None:
    """What must hold however many things went wrong."""
    finished = [event["sequence"] for event in log.of("sequence.finished")]
    assert len(finished) == len(set(finished)) == STEPS * 8 * 8 * 2, "every sequence ends exactly once"
    assert len(log.of("sample.scored")) == STEPS * 8 * 8
    assert [event["version"] for event in log.of("version.published")] == list(range(1, STEPS + 1))
    check_one_owner(log)


def check_one_owner(log: MemoryLog) -> None:
    """From the log alone: no device is owned by two live leases."""
    owner: dict[int, int] = {}
    for event in log.of("lease"):
        if event["state"] == "loading":
            for device in event["devices"]:
                assert device not in owner, f"device {device} has two owners"
                owner[device] = event["lease"]
        elif event["state"] in ("released", "lost"):
            for device in event["devices"]:
                if owner.get(device) == event["lease"]:
                    del owner[device]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_run_survives_what_goes_wrong(block: int) -> None:
    for seed in range(block, SEEDS, BLOCKS):
        system = list(SYSTEMS)[seed // BLOCKS % len(SYSTEMS)]
        staleness = seed % 3
        spec = small_spec(system, seed=seed, steps=STEPS, staleness=staleness)
        log, tally, _ = simulate(spec, faults_of(seed))
        check(log, staleness)
        summary = tally.summary()
        assert summary["realised_staleness"]["max"] <= staleness
        assert summary["makespan_s"] >= summary["lower_bound_s"]
        assert min(summary["gpu_time_share"].values()) >= -1e-9
        assert sum(summary["gpu_time_share"].values()) == pytest.approx(1.0)


def test_faults_really_happen() -> None:
    """The suite above would prove nothing if its faults never met work, or shifts."""
    met = {
        "device.lost": 0,
        "chunk.dropped": 0,
        "train.lost": 0,
        "failed shifts": 0,
        "requeued": 0,
        "shifts": 0,
    }
    for seed in range(40):
        log, tally, _ = simulate(small_spec(seed=seed, steps=STEPS, staleness=seed % 3), faults_of(seed))
        for kind in ("device.lost", "chunk.dropped", "train.lost"):
            met[kind] += len(log.of(kind))
        met["failed shifts"] += tally.summary()["failed_shifts"]
        met["shifts"] += tally.summary()["shifts"] > 8  # more than the first placement takes
        met["requeued"] += sum(
            len(event["sequences"]) for event in log.of("sequences.requeued") if event["why"] == "loss"
        )
    assert all(met.values()), met


def test_a_lost_training_unit_repeats_the_step() -> None:
    spec = small_spec("disaggregated", steps=1)
    undisturbed, _, _ = simulate(spec)
    began = undisturbed.of("train.began")[0]["t"] / 1e9
    ended = undisturbed.of("train.ended")[0]["t"] / 1e9
    losses = (Fault((began + ended) / 2, 0),)
    log, _, _ = simulate(spec, lambda backend: FaultyBackend(backend, losses))
    assert len(log.of("train.began")) == 2
    assert len(log.of("train.lost")) == 1
    assert len(log.of("version.published")) == 1


def test_a_death_that_is_heard_of_late_does_not_end_the_run() -> None:
    """A replica dies, and a shift tries to drain it before its stream has said so."""
    noise = Noise(late=1e-9, late_s=5.0)
    shifts = [event["t"] / 1e9 for event in simulate(small_spec(steps=2))[0].of("shift.began")]
    for began in shifts[::2]:
        for device in range(8):
            losses = (Fault(max(0.0, began - 1.0), device),)
            log, _, _ = simulate(
                small_spec(steps=2), lambda backend, f=losses: FaultyBackend(backend, f, noise)
            )
            assert len(log.of("version.published")) == 2


def test_a_lost_replica_keeps_what_was_streamed() -> None:
    spec = small_spec("disaggregated", steps=1)
    log, _, runtime = simulate(spec, lambda backend: FaultyBackend(backend, (Fault(6.0, 4),)))
    assert runtime.layout.template[Role.TRAIN] == 4  # so device 4 rolls out
    lost = [event for event in log.of("sequences.requeued") if event["why"] == "loss"]
    kept = [tokens for event in lost for tokens in event["tokens"]]
    assert kept
    assert any(kept)
    assert all(tokens % 16 == 0 for tokens in kept)

"""Calibration: coefficients that made the times are found again, and files are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import UsageError
from harness.runs.live_costs import SHIPPED, load_calibration, save_calibration
from systems.costs.calibrated import FittedTraining
from systems.types import How, Placement, Role, Shift, Step
from workloads.groups import load_group

pytest.importorskip("torch")

from harness.runs.measure_live import fit_serving, fit_training

STEP, ROW, KV, READ, TOKEN = 1.2e-3, 4e-5, 3e-7, 5e-3, 2.5e-5


def steps(rng: np.random.Generator, noise: float) -> list[list[float]]:
    """Decode steps of 1 to 64 rows, every eighth with newcomers."""
    made = []
    for index in range(400):
        rows = int(rng.integers(1, 65))
        kv = rows * float(rng.integers(20, 250))
        read = float(rng.integers(30, 400)) if index % 8 == 0 else 0.0
        seconds = STEP + ROW * rows + KV * kv + (READ + TOKEN * read if read else 0.0)
        made.append([rows, kv, read, seconds * float(rng.lognormal(0, noise))])
    return made


def test_serving_coefficients_are_found_again() -> None:
    rng = np.random.default_rng(0)
    fit = fit_serving([steps(rng, 0.02) for _ in range(4)])
    found = (fit.step_s, fit.row_s, fit.kv_token_s, fit.read_s, fit.read_token_s)
    assert found == pytest.approx((STEP, ROW, KV, READ, TOKEN), rel=0.15)
    assert fit.held_out_error < 0.01


def test_the_held_out_error_shows_a_machine_that_drifts() -> None:
    rng = np.random.default_rng(0)
    slow = [[*step[:3], step[3] * 1.5] for step in steps(rng, 0.0)]
    fit = fit_serving([steps(rng, 0.0), slow, steps(rng, 0.0)])
    assert 0.1 < fit.held_out_error < 0.5


def test_training_coefficients_are_found_again() -> None:
    rng = np.random.default_rng(1)
    tokens = [float(t) for t in rng.integers(500, 4000, 40)]
    rounds = [[(t, 0.01 + 1e-4 * t) for t in tokens[i::4]] for i in range(4)]
    fit = fit_training(rounds, optimizer_s=0.005)
    assert (fit.micro_batch_s, fit.token_s) == pytest.approx((0.01, 1e-4), rel=1e-3)


def test_what_comes_with_the_project_is_measured_and_covers_all_real_groups(tmp_path: Path) -> None:
    shipped = load_calibration(None)
    assert shipped.about.kind == "measured"
    for name in ("tiny-dense", "tiny-moe"):
        cost = shipped.of(name).cluster(load_group(name))
        assert cost.warm_shift_s() > 0
        unit, rollout = Placement(Role.TRAIN, (0, 1)), Placement(Role.ROLLOUT, (0,))
        shift = Shift(0, (unit,), (rollout,), How.MIGRATE)
        assert (
            cost.phase(Step.LOAD, shift)[0] == shipped.groups[name].control.phase_s[Role.ROLLOUT][Step.LOAD]
        )
        assert (
            cost.phase(Step.RELEASE, shift)[0]
            == shipped.groups[name].control.phase_s[Role.TRAIN][Step.RELEASE]
        )
    save_calibration(shipped, tmp_path / "again.toml")
    assert load_calibration(tmp_path / "again.toml") == shipped


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("step_s", "stepp_s", "groups.tiny-dense.rollout"),
        ("step_s = 0", "step_s = -0", "greater than or equal to 0"),
        ("[about]", "[about", r"x.toml:\d+: expected"),
    ],
)
def test_a_broken_file_is_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(SHIPPED.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match=says) as error:
        load_calibration(path)
    assert str(error.value).startswith(f"--calibration {path}:")
    assert "\n" not in str(error.value)


def test_a_group_that_was_not_measured() -> None:
    with pytest.raises(UsageError, match="bench calibrate --model dense-9b"):
        load_calibration(None).of("dense-9b")


def test_more_devices_than_micro_batches_do_not_help() -> None:
    training = FittedTraining(0.1, 1e-3, 0.0, micro_batches=2, mini_batches=1)
    assert [training.micro_s(100, 0.0, devices) for devices in (1, 2, 3)] == pytest.approx([0.2, 0.1, 0.1])


def test_a_calibration_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"--calibration .*c\.toml: .*decode"):
        load_calibration(path)

"""The simulator against the public measurements; skipped where the folder is not there."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.validate import command
from harness.errors import UsageError
from harness.fit.coefficients import fit_all, write
from harness.fit.kernels import fit_kernel, kernel_tables, read_rows
from harness.fit.served_runs import RUNS, latency_errors, makespan_error, read_run, simulate
from systems.costs import kernels as shipped
from systems.costs.forward import engines
from systems.costs.hardware import load_hardware
from workloads.groups import architecture

DATA = Path(os.environ.get("PIVOT_BENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the public measurements (PIVOT_BENCH_DATA)")


@needs_data
@pytest.mark.parametrize("name", ["gemm", "prefill_attention", "decode_attention", "experts", "all_reduce"])
def test_committed_kernels_are_what_the_data_gives(name: str) -> None:
    """Nobody has edited the file, and the held-out errors in it are true."""
    rows = next(table for table in kernel_tables(DATA) if table.name == name)
    committed = tomllib.loads((shipped.HERE / "kernels.toml").read_text())[name]
    fit = fit_kernel(rows)
    assert committed["held_out_error"] == pytest.approx(fit.error, abs=5e-4)
    assert committed["rows"] == fit.rows
    for key in ("compute", "memory", "t0_s"):
        if key in committed:
            assert committed[key] == pytest.approx(getattr(fit.value, key), rel=1e-2)


@needs_data
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.model)
def test_replays_of_public_runs(run: object) -> None:
    kernels = shipped.kernels_of(load_hardware("rtxpro6000"))
    requests = read_run(DATA, run.file)  # type: ignore[attr-defined]
    ends = simulate(requests, run, architecture(run.model), kernels, engines()["vllm"])  # type: ignore[arg-type, attr-defined]
    assert abs(makespan_error(requests, ends)) <= 0.10
    assert abs(latency_errors(requests, ends)).mean() <= 0.15


@needs_data
@pytest.mark.slow
def test_the_whole_table_meets_its_targets(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command, ["--data", str(DATA), "--out", str(tmp_path), "--json"], catch_exceptions=False
    )
    rows = json.loads(result.stdout)
    assert result.exit_code == 0, [row for row in rows if row["met"] is False]
    assert {"name", "value", "target", "met"} <= set(rows[0])
    assert sum(row["met"] is True for row in rows) >= 13
    assert json.loads((tmp_path / "validation.json").read_text()) == rows
    for ending in ("pdf", "png", "csv"):
        assert (tmp_path / f"predicted-against-measured.{ending}").stat().st_size > 1000


@pytest.fixture(scope="module")
def fitted_again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, said = tmp_path_factory.mktemp("fit"), list[str]()
    write(fit_all(DATA, said.append), out)
    assert any("held-out error" in line for line in said)
    return out


NOT_REPRODUCED = pytest.mark.xfail(
    strict=True, reason="vllm's step_s and layer_s trade against each other: see docs/limits.md"
)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kernels.toml", "training.toml", pytest.param("engines.toml", marks=NOT_REPRODUCED)]
)
def test_fit_writes_what_is_committed(name: str, fitted_again: Path) -> None:
    new, old = (tomllib.loads((folder / name).read_text()) for folder in (fitted_again, shipped.HERE))
    assert new.keys() == old.keys()
    for key, table in new.items():
        assert table == pytest.approx(old[key], rel=2e-2), key


def test_missing_data_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data .*: x\.csv: No such file"):
        read_rows(tmp_path, "x.csv", ("a",))
    (tmp_path / "x.csv").write_text("b,c\n1,2\n")
    with pytest.raises(UsageError, match=r"x\.csv: no column a"):
        read_rows(tmp_path, "x.csv", ("a",))
    (tmp_path / "x.csv").write_text("a\n")
    with pytest.raises(UsageError, match=r"x\.csv: is empty"):
        read_rows(tmp_path, "x.csv", ("a",))


@needs_data
def test_a_folder_without_one_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "data", copy_function=os.symlink)
    (tmp_path / "data" / "ops_h100_sxm_vllm0.19.0_moe_bf16.csv").unlink()
    with pytest.raises(UsageError, match="moe_bf16"):
        kernel_tables(tmp_path / "data")

"""The simulator's coefficient files: fitted to public measurements, written with their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from harness.fit.kernels import (
    TPOT_ENGINE,
    TPOT_HARDWARE,
    TPOT_MODEL,
    Fit,
    fit_host,
    fit_kernel,
    kernel_tables,
    served_rows,
)
from harness.fit.rl_steps import Parts, Published, Shares, fit_shares, parts_of, published
from harness.fit.served_runs import fit_link
from systems.costs.forward import Host
from systems.costs.hardware import MEASURED_ON, load_hardware
from systems.costs.kernels import Kernels
from systems.machine.files import replace_file
from workloads.groups import architecture

OPERATORS = "ops_h100_sxm_vllm0.19.0_*.csv: ai-dynamo/aiconfigurator systems data, Apache-2.0"
END_TO_END = "e2e_silicon_hopper.csv: ai-dynamo/aiconfigurator silicon_sample.csv, Apache-2.0"
RL_STEPS = "rl_step_nemo.csv: NVIDIA-NeMo/RL docs/about/performance-summary.md, Apache-2.0"
LINK = "first 100 requests of run_rtxpro6000_vllm019_Qwen3-32B.csv: casys-kaist/LLMServingSim, MIT"


@dataclass(frozen=True)
class Fitted:
    """Everything that `bench fit` finds."""

    fits: dict[str, Fit]
    kernels: Kernels
    host: Host
    steps: list[Published]
    parts: list[Parts]
    shares: Shares


def fit_all(data: Path, said: Callable[[str], None]) -> Fitted:
    """Kernels, the host layer on top of them, the link of devices without NVLink, then training."""
    fits = {}
    for rows in kernel_tables(data):
        fits[rows.name] = fit_kernel(rows)
        said(f"{rows.name}: {len(rows.seconds)} rows, held-out error {fits[rows.name].error:.1%}")
    kernels = Kernels(load_hardware(MEASURED_ON), **{name: fit.value for name, fit in fits.items()})
    model = architecture("Qwen3-32B")
    host = fit_host(kernels, model, served_rows(data, TPOT_MODEL, TPOT_HARDWARE, TPOT_ENGINE))
    said(f"host layer of vLLM: {host.step_s * 1e3:.2f} ms a step, {host.layer_s * 1e6:.1f} us a layer")
    link = fit_link(data, model, load_hardware("rtxpro6000"), kernels, host)
    said(f"all-reduce over PCIe: {link.pcie:.2f} of the link")
    kernels = Kernels(kernels.hardware, **{**_by_name(kernels), "all_reduce": link})
    steps, _ = published(data)
    parts = [parts_of(row, kernels, host) for row in steps]
    shares = fit_shares(steps, parts)
    said(f"training: {shares.dense:.2f} of the peak, {shares.experts:.3f} with experts")
    return Fitted(fits, kernels, host, steps, parts, shares)


def _by_name(kernels: Kernels) -> dict[str, Any]:
    return {name: getattr(kernels, name) for name in Kernels.__dataclass_fields__ if name != "hardware"}


def write(fitted: Fitted, out: Path) -> list[Path]:
    """`kernels.toml`, `engines.toml` and `training.toml` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    kernels = {
        name: {
            **_rounded(asdict(value)),
            "held_out_error": round(fitted.fits[name].error, 4),
            "rows": fitted.fits[name].rows,
            "shape_groups": fitted.fits[name].groups,
        }
        for name, value in _by_name(fitted.kernels).items()
    }
    engines = {"vllm": _rounded(asdict(fitted.host))}
    shares = asdict(fitted.shares)
    training = {
        "utilisation": _rounded({kind: shares.pop(kind) for kind in ("dense", "experts")}),
        "fit": {**_rounded({"held_out_error_dense": shares["held_out_error_dense"]}), "rows": shares["rows"]},
    }
    head = "# Fitted by 'bench fit --data DIR'; do not edit. Source: "
    files = {
        "kernels.toml": f"{head}{OPERATORS}.\n# pcie of all_reduce: {LINK}.\n" + tomli_w.dumps(kernels),
        "engines.toml": f"{head}{END_TO_END}.\n" + tomli_w.dumps(engines),
        "training.toml": f"{head}{RL_STEPS}.\n# Shares of the peak bf16 rate.\n" + tomli_w.dumps(training),
    }
    for name, text in files.items():
        replace_file(out / name, text)
    return [out / name for name in files]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.6g}") for key, value in values.items()}

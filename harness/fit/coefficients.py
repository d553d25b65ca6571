"""The simulator's coefficient files: fitted to public measurements, written with their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from harness.fit import closed_loop
from harness.fit.kernels import (
    OTHERS,
    PARTS,
    TPOT_ENGINE,
    TPOT_HARDWARE,
    TPOT_MODEL,
    Band,
    Fit,
    fit_host,
    fit_kernel,
    held_out,
    kernel_tables,
    linear_table,
    served_rows,
    transferred,
)
from harness.fit.rl_steps import (
    Parts,
    Published,
    Shares,
    fit_communication,
    fit_shares,
    parts_of,
    published,
)
from harness.fit.rl_steps import predict as predict_steps
from harness.fit.served_runs import fit_link
from harness.fit.shifts import held_out_shifts, quoted
from systems.costs.forward import Host
from systems.costs.hardware import MEASURED_ON, load_hardware
from systems.costs.kernels import Kernels
from systems.machine.files import replace_file
from workloads.groups import architecture

OPERATORS = (
    "ops_h100_sxm_vllm0.19.0_*.csv, ops_a100_h200_vllm.csv, ops_h100_linear_attention_vllm0.24.0.csv: "
    "ai-dynamo/aiconfigurator systems data, Apache-2.0"
)
LATER = "serve_qwen3-8b_h100_vllm0.30.csv: tgarg01/silybench-data, CC BY 4.0"
SCALING = "rl_step_verl.csv: verl-project/verl docs/advance/fully_async.md, Apache-2.0"
END_TO_END = "e2e_silicon_hopper.csv: ai-dynamo/aiconfigurator silicon_sample.csv, Apache-2.0"
RL_STEPS = "rl_step_nemo.csv: NVIDIA-NeMo/RL docs/about/performance-summary.md, Apache-2.0"
LINK = "first 100 requests of run_rtxpro6000_vllm019_Qwen3-32B.csv: casys-kaist/LLMServingSim, MIT"


@dataclass(frozen=True)
class Fitted:
    """Everything that `bench fit` finds."""

    fits: dict[tuple[str, str], Fit]  # by kernel and device
    transfers: dict[str, Band]  # by kernel, what a transfer to another device is worth
    kernels: Kernels  # of the H100
    host: Host  # of vLLM 0.12
    asynchronous: Host  # of vLLM 0.30
    steps: list[Published]
    parts: list[Parts]
    shares: Shares
    byte_s: float  # of communication


def fit_all(data: Path, said: Callable[[str], None]) -> Fitted:
    """Kernels, the host layers on top of them, the link of devices without NVLink, then training."""
    fits, tables = {}, [*kernel_tables(data), linear_table(data, "generation")]
    for rows in tables:
        fit = fits[rows.name, rows.device] = fit_kernel(rows)
        said(f"{rows.device} {rows.name}: {fit.rows} rows, held-out error {fit.error:.1%}")
    found = {name: fit.value for (name, device), fit in fits.items() if device == MEASURED_ON}
    decode = {field: getattr(found["linear_generation"], field) for field in PARTS["linear_generation"]}
    linear = replace(found.pop("linear_context"), **decode)
    del found["linear_generation"]
    kernels = Kernels(load_hardware(MEASURED_ON), **found, linear_attention=linear)
    model = architecture("Qwen3-32B")
    host = fit_host(kernels, model, served_rows(data, TPOT_MODEL, TPOT_HARDWARE, TPOT_ENGINE))
    said(f"host of vLLM 0.12: {host.step_s * 1e3:.2f} ms a step, {host.sequence_s * 1e6:.1f} us a sequence")
    later = closed_loop.fit_asynchronous(architecture(closed_loop.MODEL), kernels, closed_loop.points(data))
    said(f"of vLLM 0.30: {later.step_s * 1e3:.2f} ms a step, {later.sequence_s * 1e6:.1f} us a sequence")
    link = fit_link(data, model, load_hardware("rtxpro6000"), kernels, host)
    said(f"all-reduce over PCIe: {link.pcie:.2f} of the link")
    kernels = replace(kernels, all_reduce=link)
    byte_s = fit_communication(data)
    said(f"communication of an optimizer step: {byte_s * 1e9:.2f} s a GB of parameters")
    steps, _ = published(data)
    parts = [parts_of(row, kernels, host, byte_s) for row in steps]
    shares = fit_shares(steps, parts)
    said(f"training: {shares.dense:.2f} of the peak, {shares.experts:.3f} with experts")
    return Fitted(fits, transferred(tables, fits), kernels, host, later, steps, parts, shares, byte_s)


def write(fitted: Fitted, data: Path, out: Path) -> list[Path]:
    """`kernels.toml`, `engines.toml`, `training.toml` and `bands.toml` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, dict[str, Any]] = {}
    for (name, device), fit in fitted.fits.items():
        told = {
            "held_out_error": round(fit.error, 4), "rows": fit.rows, "shape_groups": fit.groups,
        }  # fmt: skip
        if name in PARTS:  # two tables, one kernel
            entry = kernels.setdefault(device, {}).setdefault("linear_attention", {})
            entry |= _rounded({field: getattr(fit.value, field) for field in PARTS[name]})
            entry |= {f"{name.removeprefix('linear_')}_{key}": value for key, value in told.items()}
        else:
            value = fitted.kernels.all_reduce if (name, device) == ("all_reduce", MEASURED_ON) else fit.value
            kernels.setdefault(device, {})[name] = {**_rounded(asdict(value)), **told}
    engines = {
        "vllm-0.12": {
            "about": "synchronous: the next step is scheduled when the last one is over", "sampler": 9.5,
            "graphs_gib": 0.0, **_rounded(asdict(fitted.host)),
        },
        "vllm-0.30": {
            "about": "asynchronous: the next step is scheduled while this one runs", "sampler": 3.7,
            "graphs_gib": 0.5, **_rounded(asdict(fitted.asynchronous)),
        },
    }  # fmt: skip
    shares = asdict(fitted.shares)
    training = {
        "utilisation": _rounded({kind: shares.pop(kind) for kind in ("dense", "experts")}),
        "communication": _rounded({"byte_s": fitted.byte_s}),
        "fit": {**_rounded({"held_out_error_dense": shares["held_out_error_dense"]}), "rows": shares["rows"]},
    }
    head = "# Fitted by 'bench fit --data DIR'; do not edit. Source: "
    files = {
        "kernels.toml": f"{head}{OPERATORS}.\n# pcie of all_reduce: {LINK}.\n" + tomli_w.dumps(kernels),
        "bands.toml": f"{head}the same.\n{BANDS}" + tomli_w.dumps(bands_of(fitted, data)),
        "engines.toml": f"{head}{END_TO_END}; {LATER}.\n# sampler and graphs_gib: public start-up logs.\n"
        + tomli_w.dumps(engines),
        "training.toml": f"{head}{RL_STEPS}; {SCALING}.\n# Shares of the peak bf16 rate.\n"
        + tomli_w.dumps(training),
    }
    for name, text in files.items():
        replace_file(out / name, text)
    return [out / name for name in files]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.6g}") for key, value in values.items()}


BANDS = """# How well each coefficient is known: 80 % of what is plausible lies between `low` and `high` times
# the seconds (or bytes) that it gives. measured: rows of this device, held out by shape. transferred: other
# devices' rows under the H100's coefficients. assumed: nobody has measured it, or a handful of rows has.
"""
SPREAD = 1.2816  # standard deviations from the middle of a normal distribution to the ends of 80 % of it


def bands_of(fitted: Fitted, data: Path) -> dict[str, Any]:
    """By axis, and device where it has rows of its own."""
    found: dict[str, Any] = {}
    for (name, device), fit in fitted.fits.items():
        if name != "linear_generation":
            axis = "linear_attention" if name == "linear_context" else name
            source = f"{fit.rows} rows, held out by shape"
            found.setdefault(axis, {})[device] = _band(fit.band.low, fit.band.high, "measured", source)
    for name, band in fitted.transfers.items():
        low, high = min(1.0, band.low), max(1.0, band.high)
        found[name]["transferred"] = _band(low, high, "transferred", f"rows of {' and '.join(OTHERS)}")
    widest = found["prefill_attention"]["transferred"]
    found["linear_attention"]["transferred"] = {
        **widest,
        "status": "assumed",
        "source": "as prefill attention",
    }
    model, rows = architecture("Qwen3-32B"), served_rows(data, TPOT_MODEL, TPOT_HARDWARE, TPOT_ENGINE)
    steps = held_out(fitted.kernels, model, rows, lambda row: row.concurrency)
    off = -np.log1p(np.concatenate(list(steps.values())))
    found["host"] = _spread(off, "measured", f"{len(off)} whole steps of vLLM 0.12, held out by concurrency")
    dense = [
        (row.step_s, one.step_s)
        for row, part, one in zip(
            fitted.steps, fitted.parts, predict_steps(fitted.steps, fitted.parts), strict=True
        )
        if not part.experts
    ]
    off = np.log([step_s / found_s for step_s, found_s in dense])
    found["training"] = _spread(off, "transferred", f"{len(off)} whole RL steps of dense models on H100s")
    updates, shifts = quoted()
    off = np.log([row.seconds / predicted for row, predicted in held_out_shifts(updates, shifts)])
    found["shift"] = _spread(off, "transferred", f"{len(off)} warm shifts, each without its system")
    for axis, low, high, source in ASSUMED:
        found[axis] = _band(low, high, "assumed", source)
    return found


ASSUMED = (
    ("communication", 0.5, 2.0, "three rows of one model on one kind of device"),
    (
        "update",
        0.5,
        2.0,
        "five updates within 6 %, and three that others report, up to hundreds of times off",
    ),
    ("copy", 0.7, 1.4, "bandwidth between devices and host memory of a node"),
    ("memory", 0.7, 1.3, "half a GiB rms over engines' start-up logs, of two in all"),
)


def _spread(off: Any, status: str, source: str) -> dict[str, Any]:
    """A band around 1 from a few logarithms of measured over predicted."""
    half = SPREAD * float(np.sqrt(np.mean(np.square(off))))
    return _band(float(np.exp(-half)), float(np.exp(half)), status, source)


def _band(low: float, high: float, status: str, source: str) -> dict[str, Any]:
    return {**_rounded({"low": low, "high": high}), "status": status, "source": source}

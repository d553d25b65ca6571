"""The simulator against measurements that nobody here made: one row a check, with its target.

Nothing is tuned on rows that test it: kernels and the host layer are fitted anew without the rows that are
predicted, and the one fitted link is tested on requests that it was not fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.fit import closed_loop
from harness.fit.capacity import reported, source_of
from harness.fit.coefficients import Fitted, fit_all
from harness.fit.kernels import (
    TPOT_ENGINE,
    TPOT_HARDWARE,
    TPOT_MODEL,
    Served,
    held_out,
    read_rows,
    served_rows,
    tpots,
)
from harness.fit.rl_steps import predict, published, verl
from harness.fit.served_runs import (
    FITTED_REQUESTS,
    LINK_RUN,
    RUNS,
    latency_errors,
    makespan_error,
    read_run,
    simulate,
)
from harness.fit.shifts import fit_gather, fit_shifts, gathers, held_out_shifts, quoted, unfitted
from systems.costs.cost import cluster_cost
from systems.costs.forward import Forward
from systems.costs.hardware import MEASURED_ON, load_hardware
from workloads.groups import architecture

KERNEL_TARGET, OTHER_DEVICE_TARGET, TPOT_TARGET = 0.10, 0.12, 0.10
KERNEL_TARGETS = {"experts": 0.15, "linear_context": 0.15}
MAKESPAN_TARGET, LATENCY_TARGET = 0.10, 0.15
THROUGHPUT_TARGET, CAPACITY_TARGET = 0.10, 0.05
REPLAYED_ON = "rtxpro6000"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """`value` is an error; `met` is None where it is reported and not gated."""

    name: str
    value: float
    target: float | None
    met: bool | None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and every predicted beside its measured value: check, measured_s, predicted_s."""

    checks: tuple[Check, ...]
    points: pd.DataFrame

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(check) for check in self.checks]


def validate(data: Path, more: Iterable[tuple[Check, Floats, Floats]] = ()) -> Report:
    """`more` checks come last. Raises `UsageError` for a folder without the data."""
    fitted = fit_all(data, lambda line: None)
    checks: list[Check] = []
    points: list[pd.DataFrame] = []
    for part in (
        _kernels(fitted), _tpot(data, fitted), _runs(data, fitted), _h20(data, fitted),
        _rl_steps(data, fitted), _verl(data, fitted), _shifts(), _later_engine(data, fitted), _capacity(data),
        _gathers(), _store_syncs(data), more,
    ):  # fmt: skip
        for check, measured, predicted in part:
            checks.append(check)
            points.append(
                pd.DataFrame({"check": check.name, "measured_s": measured, "predicted_s": predicted})
            )
    return Report(tuple(checks), pd.concat(points, ignore_index=True))


Part = Iterator[tuple[Check, Floats, Floats]]


def _gated(name: str, value: float, target: float, note: str) -> Check:
    return Check(name, value, target, abs(value) <= target, note)


def _kernels(fitted: Fitted) -> Part:
    nothing = np.zeros(0)
    for (name, device), fit in fitted.fits.items():
        target = KERNEL_TARGETS.get(name, KERNEL_TARGET if device == MEASURED_ON else OTHER_DEVICE_TARGET)
        band = f"80 % band {fit.band.low:.2f} to {fit.band.high:.2f}, covers {fit.band.coverage:.0%} held out"
        note = f"MAPE of {fit.rows} {device} rows, held out by shape ({fit.groups} groups); {band}"
        yield _gated(f"kernel {name}, {device}", fit.error, target, note), nothing, nothing


def _tpot(data: Path, fitted: Fitted) -> Part:
    model, kernels = architecture("Qwen3-32B"), fitted.kernels
    rows = served_rows(data, TPOT_MODEL, TPOT_HARDWARE, TPOT_ENGINE)
    ways: dict[str, Callable[[Served], int]] = {
        "TP": lambda row: row.tp,
        "concurrency": lambda row: row.concurrency,
    }
    for label, by in ways.items():
        errors = held_out(kernels, model, rows, by)
        flat = np.concatenate(list(errors.values()))
        worst = max(errors, key=lambda value: float(np.mean(np.abs(errors[value]))))
        note = f"MAPE of {len(rows)} rows, vLLM 0.12 on H100; worst {label} {worst}"
        measured = np.array([row.tpot_s for value in errors for row in rows if by(row) == value])
        name = f"TPOT Qwen3-32B, held out by {label}"
        yield _gated(name, float(np.mean(np.abs(flat))), TPOT_TARGET, note), measured, measured * (1 + flat)
    for label, found in _other_engines(data).items():
        if found:
            measured = np.array([row.tpot_s for row in found])
            predicted = tpots(kernels, model, fitted.host, found)
            error = float(np.mean(np.abs(predicted / measured - 1)))
            note = f"MAPE of {len(found)} rows with vLLM's bf16 coefficients; reported, not gated"
            yield Check(f"TPOT Qwen3-32B, {label}", error, None, None, note), measured, predicted


def _other_engines(data: Path) -> Mapping[str, list[Served]]:
    return {
        "sglang": served_rows(data, TPOT_MODEL, TPOT_HARDWARE, "sglang"),
        "trtllm": served_rows(data, TPOT_MODEL, TPOT_HARDWARE, "trtllm"),
        "vLLM FP8": served_rows(data, TPOT_MODEL, TPOT_HARDWARE, "vllm", "fp8"),
    }


def _runs(data: Path, fitted: Fitted) -> Part:
    kernels = replace(fitted.kernels, hardware=load_hardware(REPLAYED_ON))
    for run in RUNS:
        requests = read_run(data, run.file)
        ends = simulate(requests, run, architecture(run.model), kernels, fitted.host)
        tested = slice(FITTED_REQUESTS if run is LINK_RUN else 0, None)
        errors = latency_errors(requests, ends)[tested]
        arrival = np.array([request.arrival_s for request in requests])[tested]
        measured = np.array([request.last_token_s for request in requests])[tested] - arrival
        fitted_on = f"; link fitted on the first {FITTED_REQUESTS}" if run is LINK_RUN else ""
        note = f"{len(errors)} requests, vLLM 0.19 on RTX PRO 6000 (coefficients of the H100){fitted_on}"
        makespan = makespan_error(requests, ends)
        last = np.array([max(request.last_token_s for request in requests)])
        yield (
            _gated(f"replay {run.model}, makespan", makespan, MAKESPAN_TARGET, note),
            last,
            last * (1 + makespan),
        )
        latency = float(np.mean(np.abs(errors)))
        name = f"replay {run.model}, latency"
        yield _gated(name, latency, LATENCY_TARGET, f"MAPE of {note}"), measured, measured * (1 + errors)


H20_MODELS = {"Qwen2.5-7B": "Qwen2.5-7B", "DeepSeek-R1-Distill-Qwen-32B": "Qwen2.5-32B"}


def _h20(data: Path, fitted: Fitted) -> Part:
    """Quoted decode steps that are, by inference, of an H20."""
    columns = ("model", "tp", "batch", "non_attention_step_ms", "attention_us_per_kv_token")
    rows = read_rows(data, "h20_decode_quoted.csv", (*columns, "attention_offset_ms"))
    kernels = replace(fitted.kernels, hardware=load_hardware("h20"))
    for label, name in H20_MODELS.items():
        chosen = [row for row in rows if row["model"] == label]
        forward = Forward(architecture(name), kernels, fitted.host, int(chosen[0]["tp"]))
        batch = np.array([float(row["batch"]) for row in chosen])
        fixed = [float(row["non_attention_step_ms"]) + float(row["attention_offset_ms"]) for row in chosen]
        measured = np.array(fixed) * 1e-3
        predicted = np.asarray(forward.decode_s(batch, 0.0))
        error = float(np.mean(np.abs(predicted / measured - 1)))
        note = f"MAPE of {len(chosen)} quoted batch sizes; extrapolated device, reported, not gated"
        yield Check(f"H20 decode step without KV, {name}", error, None, None, note), measured, predicted
        slope = np.array([float(chosen[-1]["attention_us_per_kv_token"]) * 1e-6])
        most = float(batch[-1])
        ours = np.array([(float(forward.decode_s(most, 1e6)) - float(forward.decode_s(most, 0.0))) / 1e6])
        note = "signed error of the quoted slope; extrapolated device, reported, not gated"
        signed = float(ours[0] / slope[0] - 1)
        yield Check(f"H20 decode time a KV token, {name}", signed, None, None, note), slope, ours


def _rl_steps(data: Path, fitted: Fitted) -> Part:
    """Whole RL steps, every row by itself; those of models that are not modelled are counted."""
    rows, left = published(data)
    predicted = predict(rows, fitted.parts)
    off = []
    for row, found in zip(rows, predicted, strict=True):
        note = "signed error; parameters fitted without this model; reported, not gated"
        if not found.identified:
            low, high = found.low_s / row.step_s - 1, found.high_s / row.step_s - 1
            note = f"not identified by the other models: {low:+.0%} to {high:+.0%} fit them as well; {note}"
        error = found.step_s / row.step_s - 1
        off += [abs(error)] if found.identified else []
        check = Check(f"RL step, {row.label}", error, None, None, note)
        yield check, np.array([row.step_s]), np.array([found.step_s])
    note = (
        f"{len(off)} rows whose parameters the other models identify; {len(left)} rows of other models and "
        "devices are not modelled; reported, not gated"
    )
    yield Check("RL steps, MAPE", float(np.mean(off)), None, None, note), np.zeros(0), np.zeros(0)


def _shifts() -> Part:
    """Warm shifts and new versions as others report them; every system's shifts without its own rows."""
    updates, shifts = quoted()
    fit = fit_shifts(updates, shifts)
    pairs = [(f"update, {row.what}", row.seconds, fit.updated_s(row), "fitted") for row in updates]
    pairs += [
        (f"shift, {row.system} {row.what}", row.seconds, found, "without its system")
        for row, found in held_out_shifts(updates, shifts)
    ]
    pairs += [
        (f"update, {row.what}", row.seconds, fit.updated_s(row), "fitted without it") for row in unfitted()
    ]
    for name, quoted_s, found, how in pairs:
        note = f"signed error, {how}; bytes are inference; reported, not gated"
        check = Check(name, found / quoted_s - 1, None, None, note)
        yield check, np.array([quoted_s]), np.array([found])


def _later_engine(data: Path, fitted: Fitted) -> Part:
    """vLLM 0.30: fitted to one workload, tested on the other, both ways."""
    rows, model = closed_loop.points(data), architecture(closed_loop.MODEL)
    for seen, unseen in (closed_loop.WORKLOADS, closed_loop.WORKLOADS[::-1]):
        known, tested = ([row for row in rows if row.workload == name] for name in (seen, unseen))
        host = closed_loop.fit_asynchronous(model, fitted.kernels, known)
        found = closed_loop.predicted(model, fitted.kernels, host, tested)
        measured = np.array([row.tokens_per_s for row in tested])
        off = found / measured - 1
        worst = tested[int(np.argmax(np.abs(off)))]
        note = (
            f"median of {len(tested)} closed loops on an H100, fitted to '{seen}'; worst "
            f"{off[np.argmax(np.abs(off))]:+.0%} at {worst.concurrency} requests"
        )
        value = float(np.median(np.abs(off)))
        name = f"vLLM 0.30 throughput, {unseen}"
        yield _gated(name, value, THROUGHPUT_TARGET, note), 1 / measured, 1 / found


def _capacity(data: Path) -> Part:
    """KV tokens that engines reported. Sources count alike: some are whole campaigns."""
    rows, left = reported(data)
    by_source: dict[str, list[float]] = {}
    for row in rows:
        by_source.setdefault(source_of(row.source), []).append(abs(row.error))
    medians = [float(np.median(errors)) for errors in by_source.values()]
    all_rows = np.array([abs(row.error) for row in rows])
    note = (
        f"median over {len(by_source)} sources of {len(rows)} logs of vLLM 0.2 to 0.27, p90 of logs "
        f"{np.quantile(all_rows, 0.9):.0%}; {left} logs of other models and devices are not modelled"
    )
    measured = np.array([row.tokens for row in rows])
    predicted = np.array([float(row.predicted_tokens) for row in rows])
    yield _gated("KV capacity", float(np.median(medians)), CAPACITY_TARGET, note), measured, predicted


def _gathers() -> Part:
    """Synchronisation in which parameters are gathered; two numbers, each row without itself."""
    rows = gathers()
    for row in rows:
        fit = fit_gather([other for other in rows if other is not row])
        found = fit.seconds(architecture(row.model))
        note = "signed error, fitted without it; H100s; reported, not gated"
        check = Check(f"synchronisation, {row.what}", found / row.seconds - 1, None, None, note)
        yield check, np.array([row.seconds]), np.array([found])


def _store_syncs(data: Path) -> Part:
    """Synchronisation through a checkpoint engine, as the store predicts it."""
    for row in read_rows(data, "weight_sync_verl.csv", ("method", "model", "gpu", "trainer_gpus", "seconds")):
        if not row["method"].startswith("ckpt engine"):
            continue
        model, hardware = architecture(row["model"]), load_hardware(row["gpu"])
        tp = int(row["rollout_tp"])
        cost = cluster_cost(model, model, hardware, policy_tp=tp, judge_tp=tp, max_running=256)
        found, seconds = cost.publish_s(int(row["trainer_gpus"])) + cost.update_s(), float(row["seconds"])
        note = "signed error of the store; where the bytes go differs; reported, not gated"
        name = f"synchronisation, {row['model']}, {row['method']}"
        yield Check(name, found / seconds - 1, None, None, note), np.array([seconds]), np.array([found])


def _verl(data: Path, fitted: Fitted) -> Part:
    """A 7B run on H20s, by its parts. Generation was no faster on 128 than on 64: one sequence is longest."""
    kernels = replace(fitted.kernels, hardware=load_hardware("h20"))
    found = verl(data, kernels, fitted.host, fitted.shares.dense, fitted.byte_s)
    by_gpus = {one.gpus: one for one in found}
    theirs, ours = (by_gpus[64].generation_s[i] / by_gpus[128].generation_s[i] for i in (0, 1))
    note = (
        f"speed-up of generation from 64 to 128 H20: simulated {ours:.2f}, published {theirs:.2f}, without a "
        "tail 2; lengths assumed, device extrapolated; reported, not gated"
    )
    measured, simulated = (np.array([one.generation_s[i] for one in found]) for i in (0, 1))
    yield Check("tail of verl's 7B run", ours / theirs - 1, None, None, note), measured, simulated
    for one in found:
        published_s, trained_s = one.training_s
        note = "signed error; lengths assumed, device extrapolated; reported, not gated"
        check = Check(
            f"training of verl's 7B run, {one.gpus} H20", trained_s / published_s - 1, None, None, note
        )
        yield check, np.array([published_s]), np.array([trained_s])

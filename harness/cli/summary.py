"""The summary as text: what a run measured, with the kind of every number."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from harness.results.summary import Share
from harness.runs.spec import RunSpec
from systems.costs.machines import Status, bands


def render(summary: dict[str, Any]) -> str:
    """Plain text, one fact a line."""
    kind = summary["kind"]
    gpus, makespan = summary["gpus"], summary["makespan_s"]
    devices = "workers" if kind == "measured" else "GPUs"
    steps = summary["steps"]
    tokens, shares = summary["tokens_per_s"], summary["gpu_time_share"]
    scale = summary["token_scale"]
    unit = "tokens/s" if scale == 1 else f"tiny tokens/s (each stands for {scale} of the pair's)"
    lines = [
        f"{summary['system']} on {summary['model']}: policy {summary['policy']} + judge {summary['judge']}, "
        f"{gpus} {devices}, {len(steps)} steps, seed {summary['seed']}",
        f"run              {summary['run']}",
        f"numbers          {kind}" + _caveat(summary),
        *(
            [f"machine          {summary['machine']}"]
            if summary.get("machine", "nominal") != "nominal"
            else []
        ),
        f"makespan         {makespan:.1f} s ({kind}), {_ratio(makespan, summary['lower_bound_s'])} of the "
        f"lower bound {summary['lower_bound_s']:.1f} s" + (" (calibrated)" if kind == "measured" else ""),
        f"throughput       {tokens['total']:.0f} {unit} = policy {tokens['policy']:.0f} + judge "
        f"{tokens['judge']:.0f}; {tokens['total_per_gpu']:.1f} per GPU ({kind})",
        "step             " + _step_line(steps) + f" ({kind})",
        "GPU time         " + ", ".join(f"{name} {100 * shares[name]:.1f} %" for name in Share),
        "shifts           " + _shift_line(summary),
        f"migrations       {summary['migrations']}",
        f"staleness        mean {summary['realised_staleness']['mean']:.2f}, max "
        f"{summary['realised_staleness']['max']} (bound {summary['staleness_bound']})",
    ]
    if steps[0]["reward"] is not None:
        lines.append("learning         " + _learning_line(steps) + " (real text and weights)")
    lines += cut_off_lines(summary)
    if summary["device_losses"]:
        lines.append(f"device losses    {summary['device_losses']}")
    if summary["weights_sha256"]:
        lines.append(f"weights sha256   {summary['weights_sha256']}")
    lines.append(f"events sha256    {summary['events_sha256']}")
    return "\n".join(lines)


def machine_lines(spec: RunSpec) -> list[str]:
    """Which machine a simulated run is on, and how well each coefficient behind it is known."""
    if spec.on.measured:
        return []
    on = f"plausible machine {spec.machine}" if spec.machine else "nominal; --machines N draws others"
    lines = [f"machine          {on}"]
    known = bands(spec.group.cluster.hardware)
    for status in Status:
        of_status = [(axis, band) for axis, band in known.items() if band.status is status]
        said = ", ".join(f"{axis} {band.low:.2f}-{band.high:.2f}" for axis, band in of_status)
        if said:
            lines.append(f"{status:<17}{said}  (80 %, times the seconds)")
    return lines


def cut_off_lines(summary: dict[str, Any]) -> list[str]:
    """What was cut off or could not be parsed, and a warning where that is much."""
    counts = summary["cut_off"]
    said = []
    for key, of in (("responses_truncated", "responses"), ("judgements_truncated", "judgements")):
        if counts[key] is not None:
            said.append(f"{counts[key]} of {counts[of]} {of} truncated at their cap")
    if counts["verdicts_unparsable"] is not None:
        truncated = f"{counts['unparsable_truncated']} of them truncated"
        said.append(f"{counts['verdicts_unparsable']} verdicts unparsable ({truncated})")
    lines = ["cut off          " + ("; ".join(said) or "not recorded")]
    return lines + [f"WARNING          {line}" for line in summary["warnings"]]


def cut_off_step(step: dict[str, Any]) -> str:
    """The same of one RL step, as short as its line needs; nothing where nothing was cut off."""
    parts = [
        f"{step[key]} {text}"
        for key, text in (
            ("responses_truncated", "responses cut"),
            ("judgements_truncated", "judgements cut"),
            ("verdicts_unparsable", "unparsable"),
            ("unparsable_truncated", "of them cut"),
        )
        if step[key]
    ]
    return "  " + ", ".join(parts) if parts else ""


def caveats(summary: dict[str, Any]) -> list[str]:
    """What a reader of any number of this run must know."""
    known = {
        "extrapolated": "kernel times are extrapolated from another device",
        "oversubscribed": "oversubscribed: more workers than cores, not to be compared",
    }
    return [text for key, text in known.items() if summary.get(key)]


def _caveat(summary: dict[str, Any]) -> str:
    said = caveats(summary)
    return f" ({'; '.join(said)})" if said else ""


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f} x" if base else "-"


def _step_line(steps: list[dict[str, Any]]) -> str:
    def mean(key: str) -> float:
        return fmean(step[key] for step in steps)

    return (
        f"{mean('step_s'):.1f} s = wait for batch {mean('wait_for_batch_s'):.1f} + wait for trainer "
        f"{mean('wait_for_trainer_s'):.1f} + train {mean('train_s'):.1f}"
    )


def _shift_line(summary: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {facts['mean_s']:.2f}" for name, facts in summary["shift_phases"].items())
    failed = f", {summary['failed_shifts']} failed" if summary["failed_shifts"] else ""
    device_s = sum(facts["device_s"] for name, facts in summary["shift_phases"].items() if name != "drain")
    return (
        f"{summary['shifts']}{failed}; mean seconds by phase: {phases or '-'}; "
        f"{device_s:.0f} GPU-seconds after draining"
    )


def _learning_line(steps: list[dict[str, Any]]) -> str:
    first, last = steps[:2], steps[-5:]

    def mean(rows: list[dict[str, Any]], key: str) -> float:
        return fmean(row[key] for row in rows)

    return (
        f"reward {mean(first, 'reward'):.3f} -> {mean(last, 'reward'):.3f}, true accuracy "
        f"{mean(first, 'true_accuracy'):.3f} -> {mean(last, 'true_accuracy'):.3f} "
        f"(first {len(first)}, last {len(last)} steps)"
    )

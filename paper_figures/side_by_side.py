"""Bars and panels of one figure: which runs are one bar, and which bars may stand beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from harness.errors import UsageError
from harness.results.comparable import Side, check_cores, check_staleness, differences
from harness.results.tables import Recorded

FIGURES_ALLOW = ("staleness",)  # what `--allow` can name here: all else is never drawn together


def bars(runs: Sequence[Recorded], allow: frozenset[str]) -> dict[tuple[str, str], Side]:
    """Runs by (model group, system), each a bar of replicates. Raises `UsageError` for other runs.

    The rule is that of comparisons (`harness/results/comparable.py`): one workload a model group, and equal
    staleness unless that is allowed. Runs of one bar must share their bound: they are shown as one number.
    """
    check_cores([Side("these runs", tuple(runs))], frozenset())
    found: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    first: dict[str, Recorded] = {}
    for run in runs:
        model, system = run.spec["group"]["name"], run.spec["system"]
        same = first.setdefault(model, run)
        if run.workload != same.workload:
            raise UsageError(f"{run.id} and {same.id} {differences(run, same)}; choose runs with --run")
        found[model, system].append(run)
    sides = {key: Side(key[1], tuple(of_bar)) for key, of_bar in found.items()}
    for (model, system), side in sides.items():
        if len(side.bounds) > 1:
            bounds = " and ".join(map(str, side.bounds))
            raise UsageError(
                f"{system} on {model} was run with staleness bounds {bounds}, which are not replicates; "
                "choose runs with --run"
            )
    for model in first:
        check_staleness([side for (of, _), side in sides.items() if of == model], allow, model)
    return sides


def staleness_label(bound: int, realised: float) -> str:
    """What a bar or a panel must say of its staleness."""
    return f"bound {bound}, realised {realised:.2f}"


def mark(runs: Sequence[Recorded]) -> str:
    """What must be seen on the picture itself where bounds are unequal; empty where they are not."""
    bounds: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        bounds[run.spec["group"]["name"]].add(run.spec["staleness"])
    return "unequal staleness bounds: asynchrony is in it" if any(len(b) > 1 for b in bounds.values()) else ""

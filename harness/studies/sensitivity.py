"""What hangs on the cost model's coefficients: the same run with each of them lower and higher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.results.log import Told
from harness.results.summary import Tally
from harness.runs.assemble import assemble
from harness.runs.runner import simulate
from harness.runs.spec import RunSpec
from workloads.groups import Costs

FACTORS = (0.8, 1.2)


@dataclass(frozen=True)
class Variant:
    """One coefficient multiplied by `factor`, and what came out."""

    coefficient: str
    factor: float
    summary: dict[str, Any]


def variants(spec: RunSpec) -> Iterator[Variant]:
    """Run them one after the other; nothing of them is recorded."""
    for coefficient in Costs.model_fields:
        for factor in FACTORS:
            costs = spec.group.costs.model_copy(
                update={coefficient: getattr(spec.group.costs, coefficient) * factor}
            )
            changed = spec.model_copy(update={"group": spec.group.model_copy(update={"costs": costs})})
            yield Variant(coefficient, factor, simulated(changed))


def simulated(spec: RunSpec) -> dict[str, Any]:
    parts, tally = assemble(spec), Tally()
    simulate(spec, parts, Told(tally.add))
    return tally.summary()


def render_sensitivity(base: dict[str, Any], found: Iterator[Variant]) -> str:
    """A row a variant: makespan and idle time beside those of the run itself."""
    lines = ["", f"{'coefficient':<14}{'factor':>8}{'makespan':>12}{'change':>9}{'idle':>8}  (simulated)"]
    for one in found:
        makespan = one.summary["makespan_s"]
        change = makespan / base["makespan_s"] - 1
        idle = one.summary["gpu_time_share"]["idle"]
        lines.append(f"{one.coefficient:<14}{one.factor:>8.1f}{makespan:>10.1f} s{change:>+9.1%}{idle:>8.1%}")
    return "\n".join(lines)

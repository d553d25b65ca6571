"""Where a run's time went beyond its lower bound, by cause. The parts sum to makespan minus bound, exactly.

| cause                       | device time                                                        |
|-----------------------------|--------------------------------------------------------------------|
| serving without sequences   | replicas that have nothing to do                                   |
| unit without a batch        | the training unit while it does not train                          |
| on the way                  | devices that drain, restart, or belong to nobody                   |
| shifting                    | phases of shifts after their drain                                 |
| loading versions            | rollout replicas that load a new policy                            |
| reading again (why)         | contexts that were read before, at the floor's price of a token     |
| rollout, reward above floor | small batches, and prompts that more than one replica reads        |
| training above floor        | communication, bubbles, optimizer: what more devices do not shorten |
| critical path               | negative: how far the longest chain lifts the bound above the work |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from systems.costs.bounds import Floor, Least
from systems.types import SERVING, Role


@dataclass(slots=True)
class Spent:
    """Device-seconds of a run until its last publish, and tokens that were read again by (role, why)."""

    working: dict[Role, float] = field(default_factory=dict)
    idle: dict[Role, float] = field(default_factory=dict)
    shifting: float = 0.0
    loading: float = 0.0
    reread: dict[tuple[Role, str], int] = field(default_factory=dict)


def loss_of(makespan_s: float, spent: Spent, floor: Floor, least: Least) -> dict[str, float]:
    """Device-seconds by cause."""
    total = makespan_s * floor.devices
    parts = {
        "serving without sequences": sum(spent.idle.get(role, 0.0) for role in SERVING),
        "unit without a batch": spent.idle.get(Role.TRAIN, 0.0),
        "shifting": spent.shifting,
        "loading versions": spent.loading,
    }
    again = dict.fromkeys(SERVING, 0.0)
    for (role, why), tokens in sorted(spent.reread.items()):
        device_s = tokens * floor.serving[role].prices[-1].read
        again[role] += device_s
        name = f"reading again ({why})"
        parts[name] = parts.get(name, 0.0) + device_s
    for role in SERVING:
        parts[f"{role} above floor"] = spent.working.get(role, 0.0) - least.device_s[role] - again[role]
    parts["training above floor"] = spent.working.get(Role.TRAIN, 0.0) - least.device_s[Role.TRAIN]
    known = sum(parts.values()) + sum(least.device_s.values())
    parts["on the way"] = total - known
    parts["critical path"] = (least.work_s - least.bound_s) * floor.devices
    return parts


def render(loss: Mapping[str, float], summary: Mapping[str, float]) -> str:
    """A row a cause, the largest first: seconds of the makespan, and its share."""
    makespan, bound = summary["makespan_s"], summary["lower_bound_s"]
    gpus = summary["gpus"]
    lines = [f"{'makespan':<32}{makespan:>11.1f} s {1:>8.1%}", f"{'lower bound':<32}{bound:>11.1f} s "
             f"{bound / makespan:>8.1%}"]  # fmt: skip
    for cause, device_s in sorted(loss.items(), key=lambda item: -item[1]):
        seconds = device_s / gpus
        if abs(seconds) >= 0.0005 * makespan:
            lines.append(f"  {cause:<30}{seconds:>11.1f} s {seconds / makespan:>8.1%}")
    rest = sum(loss.values()) / gpus
    lines.append(f"{'makespan minus bound':<32}{rest:>11.1f} s {rest / makespan:>8.1%}")
    return "\n".join(lines)

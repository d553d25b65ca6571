"""What a policy may answer. A wrong answer ends the run with one line that says what the policy did. Pure.

Policies come from outside too, so nothing that they do may end as a riddle somewhere in the runtime.
"""

from __future__ import annotations

import traceback
from dataclasses import is_dataclass
from typing import Any

from systems.lifecycle import IllegalTransition, check_plan
from systems.types import NS_PER_S, SERVING, Layout, Placement, Plan, Policy, Role, View

SOONEST_NS = NS_PER_S // 100  # after a view at which a policy may ask to be woken again: time must go on


class PolicyFault(RuntimeError):
    """A policy raised, or answered something that no cluster can be."""


def begin(policy: Policy[Any], layout: Layout) -> Any:
    """The memory before the first view. Raises `PolicyFault`."""
    try:
        memory = policy.begin(layout)
    except Exception as error:
        raise PolicyFault(f"policy '{policy.name}' raised in begin: {_said(error)}") from error
    return _checked(policy, memory, "begin returned")


def ask(policy: Policy[Any], view: View, memory: Any) -> tuple[Plan, Any]:
    """What the policy wants now, and its memory. Raises `PolicyFault`."""
    where = f"policy '{policy.name}' at {view.now_ns / NS_PER_S:.3f} s"
    try:
        answer = policy.plan(view, memory)
    except Exception as error:
        raise PolicyFault(f"{where} raised {_said(error)}") from error
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Plan)):
        raise PolicyFault(f"{where} returned {type(answer).__name__}, not a plan and its memory")
    plan, memory = answer
    _checked(policy, memory, f"at {view.now_ns / NS_PER_S:.3f} s remembers")
    wrong = illegal(plan, view.layout)
    if wrong:
        raise PolicyFault(f"{where} returned an illegal plan: {wrong}")
    if plan.revisit_ns is not None and plan.revisit_ns < view.now_ns + SOONEST_NS:
        raise PolicyFault(
            f"{where} asks to be woken at {plan.revisit_ns / NS_PER_S:.3f} s; the soonest is "
            f"{SOONEST_NS / 1e6:.0f} ms later"
        )
    return plan, memory


def illegal(plan: Plan, layout: Layout) -> str:
    """What is wrong with a plan; empty if it is legal."""
    known = {device.id for device in layout.devices}
    units = [placement for placement in plan.placements if placement.role is Role.TRAIN]
    if len(units) > 1:
        return f"it has {len(units)} training units, and there is one"
    if units and len(units[0].devices) < layout.train_min:
        return f"its training unit has {len(units[0].devices)} devices, and {layout.train_min} are needed"
    for placement in plan.placements:
        if wrong := _misplaced(placement, layout, known):
            return wrong
    try:
        check_plan(plan.placements)
    except IllegalTransition as error:
        return str(error)
    return ""


def _misplaced(placement: Placement, layout: Layout, known: set[int]) -> str:
    role, devices = placement.role, placement.devices
    unknown = [device for device in devices if device not in known]
    if unknown:
        return f"it places {role} on device {unknown[0]}; there are {min(known)} to {max(known)}"
    if not devices or list(devices) != sorted(set(devices)):
        return f"the devices of a {role} placement must be sorted and differ: {list(devices)}"
    if role in SERVING and len(devices) != layout.width[role]:
        return f"a {role} replica has {len(devices)} devices, and its width is {layout.width[role]}"
    return ""


def _checked(policy: Policy[Any], memory: Any, what: str) -> Any:
    if not is_dataclass(memory) or isinstance(memory, type):
        raise PolicyFault(
            f"policy '{policy.name}' {what} {type(memory).__name__}; a memory is a frozen dataclass"
        )
    return memory


def _said(error: Exception) -> str:
    """An error, and the line in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"

"""The systems under test: one small file each, found by name.

A policy module has a class with `name`, `default_staleness`, `begin` and `plan`. Adding a
system means adding a file here and a line to `SYSTEMS`; nothing else knows systems by name.
"""

from __future__ import annotations

from typing import Any

from systems.policies.colocated import Colocated
from systems.policies.disaggregated import Disaggregated
from systems.policies.pivot import Pivot
from systems.types import Policy

SYSTEMS: dict[str, type[Policy[Any]]] = {
    "colocated": Colocated,
    "disaggregated": Disaggregated,
    "pivot": Pivot,
}
ALIASES = {"shiftable": "pivot"}

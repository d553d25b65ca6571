"""Device profiles: peaks, memory and links, each value with its source and how sure it is."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "hardware"
MEASURED_ON = "h100"  # where the kernels' coefficients come from


class Status(StrEnum):
    """How sure a value is."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with its source."""

    value: float
    status: Status
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Link rates are one way."""

    name: str
    bf16_flops: float
    multiprocessors: int
    memory_bytes_per_s: float
    memory_bytes: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    rdma_bytes_per_s: float
    host_memory_bytes: float
    node_host_bytes_per_s: float  # that all devices of a node copy to or from host memory together


def hardware_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def quantities(name: str) -> Mapping[str, Quantity]:
    """Everything that is said of a device, with sources."""
    raw = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    return {
        key: Quantity(float(entry["value"]), Status(entry["status"]), entry["source"])
        for key, entry in raw.items()
        if key != "name"
    }


def load_hardware(name: str) -> Hardware:
    known = quantities(name)
    values: dict[str, Any] = {
        field.name: known[field.name].value for field in fields(Hardware) if field.name != "name"
    }
    return Hardware(name, **{**values, "multiprocessors": int(values["multiprocessors"])})

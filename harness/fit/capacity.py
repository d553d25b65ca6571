"""What an engine says it can hold, from public start-up logs, beside what the memory model says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.fit.kernels import read_rows
from systems.costs.architecture import Architecture
from systems.costs.durations import BLOCK
from systems.costs.hardware import Hardware, load_hardware
from systems.costs.memory import GIB, EngineMemory, kv_blocks, kv_bytes
from workloads.groups import architecture

FILE = "kv_capacity.csv"
MODELS = {  # those that are modelled; the others have windows, states or towers that logs count by version
    "granite-3.1-8b-instruct": "granite-3.1-8B", "Llama-3.1-8B-Instruct": "Llama-3.1-8B", "phi-2": "phi-2",
    "phi-4": "phi-4", "Mistral-Small-3.1-24B-Instruct-2503": "Mistral-Small-24B",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small-24B", "Kimi-Dev-72B": "Qwen2.5-72B",
    "Qwen1.5-MoE-A2.7B": "Qwen1.5-MoE-A2.7B", "Qwen2.5-72B-Instruct": "Qwen2.5-72B",
    "Qwen2.5-7B-Instruct": "Qwen2.5-7B", "Qwen2-7B-Instruct": "Qwen2.5-7B", "Qwen3-8B": "Qwen3-8B",
    "Qwen3-14B": "Qwen3-14B", "Qwen3-0.6B": "Qwen3-0.6B", "Qwen3-32B": "Qwen3-32B",
    "Mixtral-8x7B-v0.1": "Mixtral-8x7B", "Mistral-Nemo-Instruct-2407": "Mistral-Nemo-12B",
    "Yi-34B": "Yi-34B", "Llama-2-7b-hf": "Llama-2-7B", "Llama-2-70b-hf": "Llama-2-70B",
    "Meta-Llama-3-8B": "Llama-3.1-8B", "Llama-3.1-70B": "Llama-3.1-70B",
}  # fmt: skip
DEVICES = {"H100-80GB": "h100", "A100-80GB": "a100", "RTX PRO 6000": "rtxpro6000", "H200": "h200"}
LARGE = 70 * GIB  # devices above it have other defaults of vLLM (but not an A100)
DEFAULTS, SMALLER_DEFAULTS = (1024, 8192), (256, 2048)  # sequences, tokens a step
FEWER_SAMPLED, GRAPHS_COUNTED = (
    17,
    21,
)  # minor versions from which the dummy run is smaller, graphs are counted
OLDER_SAMPLER, SAMPLER, GRAPHS = 9.5, 3.7, 0.5 * GIB
UNKNOWN_VERSION = 11  # where a log does not say: of late 2025


@dataclass(frozen=True)
class Reported:
    """A log: context tokens that a replica holds."""

    label: str
    source: str
    model: Architecture
    hardware: Hardware
    tp: int
    engine: EngineMemory
    tokens: float

    @property
    def predicted_tokens(self) -> int:
        return kv_blocks(self.model, self.hardware, self.tp, self.engine) * BLOCK

    @property
    def error(self) -> float:
        return self.predicted_tokens / self.tokens - 1


def reported(data: Path) -> tuple[list[Reported], int]:
    """Logs of models and devices that are modelled, and how many are of others."""
    needed = (
        "model_id",
        "gpu",
        "tp",
        "version",
        "gpu_memory_utilization",
        "max_num_seqs",
        "kv_tokens",
        "source",
    )
    found, left = [], 0
    for row in read_rows(data, FILE, needed):
        name = row["model_id"].rpartition("/")[2]
        if name not in MODELS or row["gpu"] not in DEVICES:
            left += 1
            continue
        model, hardware, tp = architecture(MODELS[name]), load_hardware(DEVICES[row["gpu"]]), int(row["tp"])
        engine = engine_of(row, hardware)
        tokens = row["kv_tokens"]
        if not tokens:  # only the size of the pool is told
            left_bytes = float(row["kv_gib_per_gpu"]) * GIB
            each = kv_bytes(model, hardware, tp, engine) / (kv_blocks(model, hardware, tp, engine) * BLOCK)
            tokens = str(left_bytes / each)
        label = f"{name} TP{tp} on {row['gpu']}, {row['version']}"
        found.append(Reported(label, row["source"], model, hardware, tp, engine, float(tokens)))
    return found, left


def source_of(text: str) -> str:
    """Whom a log is from: the repository or page, without what it is called there."""
    found = re.search(r"(?:github\.com/|github |GitHub )([\w.-]+/[\w.-]+)", text)
    return found.group(1).lower() if found else text[:24]


def engine_of(row: dict[str, str], hardware: Hardware) -> EngineMemory:
    """How the log's engine was configured; what it does not say is that version's default."""
    said = re.match(r"0\.(\d+)", row["version"])
    minor = int(said.group(1)) if said else UNKNOWN_VERSION
    large = hardware.memory_bytes > LARGE and hardware.name != "a100"
    sequences, budget = DEFAULTS if large else SMALLER_DEFAULTS
    return EngineMemory(
        float(row["gpu_memory_utilization"].split()[-1]),
        int(row["max_num_seqs"] or sequences),
        int(row["max_num_batched_tokens"] or budget),
        SAMPLER if minor >= FEWER_SAMPLED else OLDER_SAMPLER,
        GRAPHS if minor >= GRAPHS_COUNTED else 0.0,
    )

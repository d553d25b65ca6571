"""Model groups: a policy, a judge, a cluster and a workload under one name, from `groups/*.toml`.

Everything that `--set table.key=value` can change is a field here; unknown keys are errors. Every number has
a largest value, far above what anyone runs, so that a slip of the keyboard is refused.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from systems.costs.architecture import Architecture
from systems.costs.cost import Sync
from systems.types import Handover, Publishing, Router

HERE = Path(__file__).parent
Count = Annotated[int, Field(ge=1, le=1024)]
MOST_DEVICES = 4096  # a step of the simulator takes half a minute there
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Share = Annotated[int, Field(ge=0, le=MOST_DEVICES)]  # of the devices
Running = Annotated[int, Field(ge=1, le=8192)]
Samples = Annotated[int, Field(ge=1, le=16_384)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Factor = Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-12, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=10)]
MeanTokens = Annotated[float, Field(gt=0, le=1e7)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Pair(Table):
    """Which models, and on how many devices one replica of each runs."""

    policy: str
    judge: str
    policy_tp: Count
    judge_tp: Count
    train_stages: Count = 1  # of a training pipeline (1: sharded data parallelism)
    # How unevenly experts are chosen: the i-th most popular one as often as i^-skew says. 0: evenly, assumed.
    routing_skew: Annotated[float, Field(ge=0, le=4)] = 0.0


class Cluster(Table):
    """Devices, and the template split among the roles (in devices)."""

    gpus: Devices
    train: Share
    rollout: Share
    reward: Share
    hardware: str = "h20"
    engine: str = "vllm-0.12"  # version of the serving engine, from `systems/costs/engines.toml`
    gpus_per_node: Count = 8
    max_running: Running = 256  # sequences a replica decodes together (vLLM: up to 1024 on large devices)
    token_scale: Count = 1
    sync: Sync = Sync.STORE  # how a new version gets to the replicas


class Memory(Table):
    """How much of a device's memory an engine may take."""

    share: Annotated[float, Field(gt=0, le=0.99)] = 0.90


class Costs(Table):
    """Factors on the cost model's coefficients, to see what hangs on them (`bench run --sensitivity`)."""

    compute: Factor = 1.0  # arithmetic of kernels and training, in rate
    memory: Factor = 1.0  # memory bandwidth
    link: Factor = 1.0  # NVLink and PCIe bandwidth
    host: Factor = 1.0  # what the engine adds to its kernels, in seconds
    training: Factor = 1.0  # share of the peak that training reaches
    shift: Factor = 1.0  # seconds of a shift's phases and of control


class Workload(Table):
    """The RL step. Defaults are the paper's (source: artifact-template)."""

    prompts: Samples = 128
    samples: Annotated[int, Field(ge=2, le=1024)] = 16  # group-normalised advantages need two
    mini_batches: Samples = 4  # mini-batches of 32 prompts
    micro_batch_samples: Samples = 64
    judge_calls: Annotated[int, Field(ge=0, le=64)] = 1  # 0: a rule gives the reward, and takes no time
    publishing: Publishing | None = None  # default: interrupt, and drain at staleness 0
    handover: Handover = Handover.COPY  # the paper's system rereads (artifact-readme)
    router: Router = Router.LATENCY  # the artifact's baselines take turns (artifact-template)


class Lengths(Table):
    """Priors of a simulated workload's lengths, in tokens. Provisional; no public trace exists.

    Responses are lognormal with an atom at the cap; a judgement's log-mean is linear in the response's log
    length. Caps: artifact-template. Levels: inference (see docs/workloads.md).
    """

    prompt_mean: MeanTokens = 200.0
    response_median: MeanTokens = 1500.0
    response_sigma: Sigma = 1.0
    group_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of the log variance: a prompt is hard for all
    drift: Annotated[float, Field(ge=-1, le=1)] = (
        0.0  # of the log-median, an RL step: responses get longer (or shorter) over training
    )
    response_cap: Tokens = 15_000
    judge_at_1k: MeanTokens = 3000.0  # median judgement of a 1,000-token response
    judge_slope: Annotated[float, Field(ge=0, le=3)] = 0.3
    judge_sigma: Sigma = 0.6
    judge_cap: Tokens = 20_000


class Learning(Table):
    """GRPO on the real models (source of clip, TIS and mini-batches: artifact-template)."""

    lr: Positive = 1e-6
    clip_low: Positive = 0.2
    clip_high: Positive = 0.28
    tis_cap: Positive = 2.0
    kl: NotNegative = 0.0
    temperature: Positive = 1.0
    grad_clip: Positive = 1.0
    max_new_tokens: Count = 224
    judge_max_new_tokens: Count = 240


class Live(Table):
    """How live workers serve."""

    max_running: Running = 64  # sequences a worker decodes together


class Faults(Table):
    """Injected faults, drawn from the run's seed: how many, and within which time."""

    losses: Annotated[int, Field(ge=0, le=1024)] = 0
    within_s: Positive = 600.0


class Real(Table):
    """Directories of real models, relative to this package."""

    policy: str
    judge: str


class ModelGroup(Table):
    """One `groups/NAME.toml`, resolved."""

    name: str
    description: str
    pair: Pair
    cluster: Cluster
    memory: Memory = Memory()
    costs: Costs = Costs()
    workload: Workload = Workload()
    lengths: Lengths = Lengths()
    learning: Learning = Learning()
    live: Live = Live()
    faults: Faults = Faults()
    real: Real | None = None
    custom: dict[str, dict[str, Any]] = {}  # shapes of models given as a config.json, by name


def group_names() -> list[str]:
    """Smallest cluster first."""
    loaded = [load_group(path.stem) for path in (HERE / "groups").glob("*.toml")]
    return [group.name for group in sorted(loaded, key=lambda g: (g.cluster.gpus, g.name))]


def load_group(name: str) -> ModelGroup:
    raw = tomllib.loads((HERE / "groups" / f"{name}.toml").read_text())
    return ModelGroup.model_validate({"name": name, **raw})


@cache
def real_positions(directory: str) -> int:
    """Positions that a real model (a directory of this package) was made with."""
    config: dict[str, int] = json.loads((HERE / directory / "config.json").read_text())
    return config["max_position_embeddings"]


def architecture_names() -> list[str]:
    """Public models whose shapes are known."""
    return list(tomllib.loads((HERE / "architectures.toml").read_text()))


def architecture(name: str) -> Architecture:
    """A public model's architecture, from `architectures.toml`."""
    known: dict[str, dict[str, Any]] = tomllib.loads((HERE / "architectures.toml").read_text())
    return Architecture(name=name, **known[name])


def architecture_of(group: ModelGroup, name: str) -> Architecture:
    """One of the pair: given by the user, or known."""
    if name in group.custom:
        return Architecture(**group.custom[name])
    return architecture(name)

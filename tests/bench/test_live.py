"""What live workers cost; run with `--benchmark-only`. `live_bench.py` writes the same as a dated file.

No test depends on a time: ratios and seconds go into the benchmark's extra information.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

pytest.importorskip("torch")

from live_bench import RolloutBench, publish_rounds, switch_times


def once(benchmark: Any, work: Any) -> Any:
    return benchmark.pedantic(work, rounds=1, iterations=1)


def test_rollout_through_the_runtime(benchmark: Any) -> None:
    rounds = once(benchmark, lambda: RolloutBench().rounds(5))
    benchmark.extra_info["median_ratio"] = median(row["ratio"] for row in rounds)
    assert all(row["runtime_tokens_per_s"] > 0 for row in rounds)


def test_publishing_to_three_workers(benchmark: Any) -> None:
    rounds = once(benchmark, lambda: publish_rounds(5))
    benchmark.extra_info["median_of_allowed"] = median(row["publish_s"] / row["allowed_s"] for row in rounds)
    assert len(rounds) == 5


def test_role_switches(benchmark: Any) -> None:
    switches = once(benchmark, lambda: switch_times(5))
    benchmark.extra_info["median_s"] = median(switch["seconds"] for switch in switches)
    assert {(switch["from"], switch["to"]) for switch in switches} == {
        ("rollout", "reward"), ("reward", "train"), ("train", "rollout"),
    }  # fmt: skip

"""One seed, one log: byte for byte, whatever the hash seed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from systems.policies import SYSTEMS
from tests.conftest import SMALL, simulate, small_spec


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("model", ["dense-9b", "moe-30b"])
def test_the_same_seed_gives_the_same_events(system: str, model: str) -> None:
    spec = small_spec(system, model, gpus=None)
    first, second = simulate(spec)[0].events, simulate(spec)[0].events
    assert first == second
    other = simulate(small_spec(system, model, gpus=None, seed=1))[0].events
    assert other != first


def test_whatever_the_hash_seed(tmp_path: Path) -> None:
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        command = [sys.executable, "-m", "harness.cli", "run", "--system", "pivot", "--model", "moe-30b"]
        command += ["--steps", "2", "--json", "--quiet", "--results", str(tmp_path)]
        command += [part for setting in SMALL for part in ("--set", setting)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        summary = json.loads(result.stdout)
        events = (Path(summary["path"]) / "events.jsonl").read_bytes()
        assert hashlib.sha256(events).hexdigest() == summary["events_sha256"]
        digests.add(summary["events_sha256"])
    assert len(digests) == 1

"""Placement independence: at staleness 0 every organisation ends with the same weights, bit for bit."""

from __future__ import annotations

import pytest

from harness.runs.assemble import assemble
from harness.runs.runner import simulate
from harness.runs.spec import resolve
from systems.policies import SYSTEMS
from tests.conftest import MemoryLog

pytest.importorskip("torch")

# Two steps of a quarter of the recipe's batch: long enough that an update is generated from, judged and
# trained on again, short enough for the default suite. The full comparison is marked slow.
QUICK = ("workload.prompts=4", "learning.max_new_tokens=96")


def final(
    system: str, model: str, gpus: int, steps: int, settings: tuple[str, ...]
) -> tuple[str, int, int, list[float]]:
    """(weights digest, migrations, device losses, true accuracy by step) of a co-simulated run."""
    spec = resolve(
        system=system, model=model, backend="cosim", steps=steps, seed=0, staleness=0, gpus=gpus,
        settings=settings,
    )  # fmt: skip
    parts = assemble(spec)
    log = MemoryLog()
    simulate(spec, parts, log)
    summary = log.tally().summary()
    assert parts.learned is not None
    accuracy = [step["true_accuracy"] for step in summary["steps"]]
    return parts.learned.weights_sha256(), summary["migrations"], summary["device_losses"], accuracy


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_weights_do_not_depend_on_the_organisation(model: str) -> None:
    reference = final("colocated", model, 4, 2, QUICK)
    assert final("disaggregated", model, 8, 2, QUICK)[0] == reference[0]
    pivot = final("pivot", model, 8, 2, QUICK)
    assert pivot[0] == reference[0]
    faulty = final("pivot", model, 8, 2, (*QUICK, "faults.losses=6", "faults.within_s=200"))
    assert faulty[2] > 0, "no worker was lost"
    assert faulty[0] == reference[0]
    assert final("pivot", model, 8, 2, (*QUICK, "learning.lr=3.1e-4"))[0] != reference[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_the_full_recipe_for_all_systems_device_counts_and_losses(model: str) -> None:
    digests: dict[str, str] = {}
    migrations = 0
    for system in SYSTEMS:
        for gpus in (4, 8):
            digests[f"{system} {gpus}"], moved, _, _ = final(system, model, gpus, 4, ())
            migrations += moved
    losses = ("faults.losses=6", "faults.within_s=900")
    digests["pivot 8 with losses"], moved, lost, _ = final("pivot", model, 8, 4, losses)
    assert lost > 0
    assert len(set(digests.values())) == 1, digests
    assert migrations + moved > 0, "no sequence migrated, so migration was not tested"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_it_really_learns_from_verdicts(model: str) -> None:
    accuracy = final_at_default_staleness(model)
    assert sum(accuracy[-5:]) / 5 >= sum(accuracy[:2]) / 2 + 0.25, accuracy


def final_at_default_staleness(model: str) -> list[float]:
    spec = resolve(
        system="pivot", model=model, backend="cosim", steps=20, seed=0, staleness=None, gpus=None, settings=()
    )
    parts = assemble(spec)
    log = MemoryLog()
    simulate(spec, parts, log)
    return [step["true_accuracy"] for step in log.tally().summary()["steps"]]

"""The search for the best static split."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.runs.spec import resolve
from harness.studies import split
from harness.studies.split import Found, best_split, with_split
from tests.conftest import SMALL, small_spec


def test_a_local_search_finds_what_trying_everything_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small form of the smallest pair."""
    spec = small_spec("disaggregated", steps=2, gpus=12)
    monkeypatch.setattr(split, "MOST_EXHAUSTIVE", 10_000)
    every = best_split(spec, tmp_path / "every")
    monkeypatch.setattr(split, "MOST_EXHAUSTIVE", 0)
    some = best_split(spec, tmp_path / "some")
    assert every.exhaustive
    assert not some.exhaustive
    assert len(some.tried) < len(every.tried)
    best, reached = min(s for _, s in every.tried), dict(some.tried)[some.text]
    assert reached <= best * 1.001
    assert "optimum of all" in every.describe()
    assert "a local optimum among" in some.describe()


def test_what_was_found_is_kept_with_its_evidence_and_never_of_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec("disaggregated", steps=1)
    found = best_split(spec, tmp_path)
    monkeypatch.setattr(split, "_search", lambda *_: pytest.fail("it was kept"))
    assert best_split(spec, tmp_path) == found
    assert len(found.tried) >= 3
    other = Found(8, 4, 4, False, ())
    monkeypatch.setattr(split, "_search", lambda *_: other)
    assert best_split(small_spec("disaggregated", steps=2), tmp_path) == other


def test_a_system_without_a_fixed_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="colocated has no fixed split"):
        best_split(small_spec("colocated"), tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("8/4", "expected TRAIN/ROLLOUT/REWARD"),
        ("8/4/x", "expected"),
        ("8/4/3", "adds up to 15, and there are 16"),
    ],
)
def test_a_split_that_is_none_is_refused(given: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(
            system="disaggregated", model="dense-9b", backend=None, steps=1, seed=0, staleness=None,
            gpus=None, settings=SMALL, split=given,
        )  # fmt: skip


def test_a_given_split_is_the_template_of_the_run() -> None:
    about = {"model": "dense-9b", "backend": None, "steps": 1, "seed": 0, "staleness": None, "gpus": None}
    spec = resolve(system="disaggregated", settings=SMALL, split="4/4/8", **about)  # type: ignore[arg-type]
    assert (spec.group.cluster.train, spec.group.cluster.rollout, spec.group.cluster.reward) == (4, 4, 8)
    plain = resolve(system="disaggregated", settings=SMALL, **about)  # type: ignore[arg-type]
    assert with_split(plain, (4, 4, 8)) == spec

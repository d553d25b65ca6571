"""Shared memory: written once, mapped by other processes, freed when nobody reads it."""

from __future__ import annotations

import os
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from systems.backends.live.store import SPARE, ParameterStore, Segment, floats, layout_of

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0), "c": torch.ones(33)}


def test_what_is_written_is_read_through_another_descriptor() -> None:
    store = ParameterStore()
    store.store("x", 0, STATE)
    segment = store.acquire("x", 0, reader=1)
    other = Segment(segment.number, os.dup(segment.fd), segment.length)
    for name, tensor in other.view(layout_of(STATE)).items():
        assert torch.equal(tensor, STATE[name])
    segment.view(layout_of(STATE))["c"][0] = 5.0
    assert other.view(layout_of(STATE))["c"][0] == 5.0, "it was copied, not mapped"
    store.close()
    assert torch.equal(other.view(layout_of(STATE))["a"], STATE["a"]), "a reader lost what it reads"


def child(fd: int, length: int, found: object) -> None:
    found.send(Segment(0, fd, length).view(layout_of(STATE))["c"].sum().item())  # type: ignore[attr-defined]


def test_a_forked_process_maps_it() -> None:
    store = ParameterStore()
    store.store("x", 0, STATE)
    context = get_context("fork")
    here, there = context.Pipe()
    segment = store.acquire("x", 0, reader=1)
    process = context.Process(target=child, args=(segment.fd, segment.length, there))
    process.start()
    assert here.recv() == 33.0
    process.join()


def test_only_fp32_is_kept() -> None:
    with pytest.raises(ValueError, match=r"b is torch\.float64"):
        ParameterStore().store("x", 0, {"b": torch.zeros(2, dtype=torch.float64)})


def test_versions_are_freed_with_their_last_reader() -> None:
    store = ParameterStore()
    for version in range(3):
        store.store("x", version, STATE)
        store.acquire("x", version, reader=version)
    assert store.versions("x") == [0, 1, 2]
    store.release(1)
    assert store.versions("x") == [0, 2]
    store.acquire("x", 2, reader=0)
    store.release(0, "x", but=2)
    assert store.versions("x") == [2]
    store.release(0)
    store.release(2)
    assert store.versions("x") == [2], "the newest is always kept"


def test_freed_memory_is_used_again() -> None:
    store = ParameterStore()
    seen = []
    for version in range(6):
        store.store("x", version, STATE)
        seen.append(store.acquire("x", version, reader=0).number)
        store.release(0, "x", but=version)
    assert len(set(seen)) <= 1 + SPARE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("prd"), st.integers(0, 3)), max_size=40))
def test_a_version_lives_exactly_as_long_as_it_is_newest_or_read(actions: list[tuple[str, int]]) -> None:
    store, newest, readers = ParameterStore(), 0, {0: set()}
    state = {"a": torch.zeros(4)}
    store.store("x", 0, state)
    for action, reader in actions:
        if action == "p":
            newest += 1
            readers[newest] = set()
            store.store("x", newest, {"a": torch.full((4,), float(newest))})
        elif action == "r":
            readers[newest].add(reader)
            store.acquire("x", newest, reader)
        else:
            for held in readers.values():
                held.discard(reader)
            store.release(reader)
        alive = [version for version, held in readers.items() if held or version == newest]
        assert store.versions("x") == alive
        for version in alive:
            kept = store.acquire("x", version, reader=99)
            assert kept.view(layout_of(state))["a"][0] == float(version)
            store.release(99)
    store.close()


def test_tensors_start_on_cache_lines() -> None:
    assert floats(layout_of({"a": torch.zeros(3), "b": torch.zeros(17)})) == 16 + 32

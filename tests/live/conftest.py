"""Live tests run on one torch thread, and may ask for another number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on a shared machine wait for each other longer than they compute."""
    pytest.importorskip("torch")
    with threads(1):
        yield

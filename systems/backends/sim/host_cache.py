"""Host memory that holds KV caches on their way from one replica to the next."""

from __future__ import annotations

from collections.abc import Collection


class HostCache:
    """`capacity_bytes` for the whole cluster: what does not fit is dropped, and read in again later."""

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0.0
        self._by_sequence: dict[int, float] = {}

    def keep(self, sequence: int, size_bytes: float) -> bool:
        """Take a cache in, if there is room for it."""
        self.drop((sequence,))
        if self.held_bytes + size_bytes > self.capacity_bytes:
            return False
        self._by_sequence[sequence] = size_bytes
        self.held_bytes += size_bytes
        return True

    def drop(self, sequences: Collection[int]) -> None:
        """These have been read back, or are worth nothing any more."""
        for sequence in sequences:
            self.held_bytes -= self._by_sequence.pop(sequence, 0.0)

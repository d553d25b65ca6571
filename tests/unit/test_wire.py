"""What goes over the wire comes out as it was, however the stream is cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from systems.backends.base import Finished, TokenChunk, Work
from systems.backends.live import wire
from systems.batching import Batch, MicroBatch, TrainSample
from systems.types import Prompt, Role, Segment

ids = st.integers(0, 1 << 40)
tokens = st.lists(st.integers(0, 200), max_size=8).map(tuple)
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def over(message: wire.Message, cut: int = 3) -> wire.Message:
    data, frames = wire.encode(message), wire.Frames()
    found = [m for i in range(0, len(data), cut) for m in frames.feed(data[i : i + cut])]
    assert len(found) == 1
    return found[0]


@given(ids, ids, st.sampled_from([Role.ROLLOUT, Role.REWARD]), tokens, tokens)
def test_work(sequence: int, key: int, role: Role, prompt: tuple[int, ...], done: tuple[int, ...]) -> None:
    work = Work(sequence, 3, role, 1, key, Prompt(len(prompt), prompt), len(done), done)
    assert wire.work_from_json(over({"x": wire.work_to_json(work)})["x"]) == work


@given(st.booleans(), tokens, st.data())
def test_chunks_keep_every_bit(ended: bool, written: tuple[int, ...], data: st.DataObject) -> None:
    logprobs = tuple(data.draw(floats32) for _ in written)
    form = Finished if ended else TokenChunk
    chunk = form(5, 2, 7, len(written), written, logprobs, 4)
    back = wire.chunk_from_json(over({"x": wire.chunk_to_json(chunk)}, cut=1)["x"])
    assert back == chunk
    assert type(back) is type(chunk)


@given(st.lists(st.tuples(tokens, tokens, floats32), min_size=2, max_size=6))
def test_batches(drawn: list[tuple[tuple[int, ...], tuple[int, ...], float]]) -> None:
    samples = [
        TrainSample(
            index, index // 2, Prompt(len(prompt), prompt), len(made), made, tuple([reward] * len(made)),
            (Segment(1, 0, len(made)),), reward,
        )
        for index, (prompt, made, reward) in enumerate(drawn)
    ]  # fmt: skip
    half = len(samples) // 2
    batch = Batch(4, ((MicroBatch(0, 0, tuple(samples[:half])),), (MicroBatch(1, 1, tuple(samples[half:])),)))
    assert wire.batch_from_json(over(wire.batch_to_json(batch), cut=17)) == batch


def test_frames_that_follow_each_other() -> None:
    data = b"".join(wire.encode({"n": n}) for n in range(5))
    frames = wire.Frames()
    assert [m["n"] for part in (data[:11], data[11:]) for m in frames.feed(part)] == list(range(5))


def test_a_broken_stream_is_noticed() -> None:
    with pytest.raises(ValueError, match="the stream is broken"):
        list(wire.Frames().feed(struct.pack("<I", 1 << 31) + b"x"))

"""What control process and worker say to each other: frames of JSON, and file descriptors beside them.

Nothing here is pickled: a frame is four bytes of length and a JSON object, so neither side runs what the
other one sends. Floats survive (JSON prints a double so that it reads back as itself).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import orjson

from systems.backends.base import Finished, TokenChunk, Work
from systems.batching import Batch, MicroBatch, TrainSample
from systems.types import End, Prompt, Role, Segment

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
LARGEST = 1 << 30  # a longer frame is not one
BEAT_S = 1.0  # a worker says that often that it lives


def encode(message: Message) -> bytes:
    body = orjson.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LARGEST:
                raise ValueError(f"a frame of {length} bytes: the stream is broken")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield orjson.loads(body)


# ------------------------------------------------------------------------------------ values as JSON


def work_to_json(work: Work) -> list[Any]:
    return [work.id, work.epoch, work.role, work.sample, work.key, work.prompt.tokens, work.tokens]


def work_from_json(raw: list[Any]) -> Work:
    sequence, epoch, role, sample, key, prompt, tokens = raw
    asked = Prompt(len(prompt), tuple(prompt))
    return Work(sequence, epoch, Role(role), sample, key, asked, len(tokens), tuple(tokens))


def chunk_to_json(chunk: TokenChunk) -> list[Any]:
    ended = isinstance(chunk, Finished)
    about = (chunk.sequence, chunk.epoch, chunk.version)
    return [ended, *about, chunk.tokens, chunk.logprobs, chunk.serial, chunk.end]


def chunk_from_json(raw: list[Any]) -> TokenChunk:
    ended, sequence, epoch, version, tokens, logprobs, serial, end = raw
    form, why = Finished if ended else TokenChunk, End(end) if end is not None else None
    return form(sequence, epoch, version, len(tokens), tuple(tokens), tuple(logprobs), serial, why)


def batch_to_json(batch: Batch) -> Message:
    return {
        "version": batch.version,
        "mini_batches": [
            [[_sample_to_json(s) for s in m.samples] for m in mini] for mini in batch.mini_batches
        ],
    }


def batch_from_json(raw: Message) -> Batch:
    minis: list[tuple[MicroBatch, ...]] = []
    index = 0
    for number, mini in enumerate(raw["mini_batches"]):
        micros = []
        for samples in mini:
            micros.append(MicroBatch(index, number, tuple(map(_sample_from_json, samples))))
            index += 1
        minis.append(tuple(micros))
    return Batch(raw["version"], tuple(minis))


def _sample_to_json(sample: TrainSample) -> list[Any]:
    return [
        sample.id, sample.group, sample.prompt.tokens, sample.tokens, sample.logprobs,
        [list(segment) for segment in sample.segments], sample.reward,
    ]  # fmt: skip


def _sample_from_json(raw: list[Any]) -> TrainSample:
    sample, group, prompt, tokens, logprobs, segments, reward = raw
    return TrainSample(
        sample, group, Prompt(len(prompt), tuple(prompt)), len(tokens), tuple(tokens), tuple(logprobs),
        tuple(Segment(*segment) for segment in segments), reward,
    )  # fmt: skip

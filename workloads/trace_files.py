"""Files of requests as people have them: CSV with any delimiter, JSON, JSONL, Parquet, each also gzipped.

A file is read by what is in it, not by its ending. Columns are found by name, whatever their case: the names
of Azure's traces, BurstGPT, ServeGen, Splitwise, Mooncake, of vLLM's and SGLang's benchmarks, and of rollouts
that verl, AReaL, slime, TRL and NeMo-RL write. Where only text is there, its length is estimated, and that is
said.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = ("output_tokens", "input_tokens", "judge_tokens")
NAMES: dict[str, tuple[str, ...]] = {
    "output_tokens": (
        "output_tokens", "output_length", "output_len", "output_lens", "output_toks", "output_token_length",
        "num_output_tokens", "output_token_count", "response_tokens", "response_length", "response_len",
        "response_lengths",
        "completion_tokens", "completion_length", "completion_len", "generated_tokens", "generatedtokens",
        "num_generated_tokens", "generation_length", "generation_lengths", "gen_tokens", "gen_len",
        "decode_tokens", "token_size",
    ),
    "input_tokens": (
        "input_tokens", "input_length", "input_len", "input_lens", "input_lengths", "input_toks",
        "input_token_length", "num_input_tokens", "input_token_count", "prompt_tokens", "prompt_length",
        "prompt_len",
        "prompt_lens", "prompt_size", "num_prompt_tokens", "context_tokens", "contexttokens",
        "request_tokens", "prefill_tokens",
    ),
    "judge_tokens": (
        "judge_tokens", "judge_length", "judge_len", "judgement_tokens", "judgement_length",
        "judgment_tokens", "judgment_length", "genrm_tokens", "reward_tokens", "verdict_tokens",
    ),
    "group_id": ("group_id", "group", "group_index", "prompt_id", "problem_id", "task_id", "uid"),
    "step": ("step", "training_step", "train_step", "global_step", "rollout_id", "iteration"),
    "probability": ("probability",),
}  # fmt: skip
TEXTS = {  # where there is no count: the fields that hold the text itself
    "output_tokens": ("output", "response", "completion", "generated_text", "generated_texts"),
    "input_tokens": ("input", "prompt", "question"),
    "judge_tokens": ("judgement", "judgment", "genrm_response", "judge_response"),
}
SPEAKERS = ("gpt", "assistant", "chatgpt")  # in a conversation, the one whose words are responses
SAMPLE_OF_UID = re.compile(r"_\d+_\d+$")  # verl's uid of a sample is that of its prompt, and which one it is
FAILURES = ("error", "errors", "failed")  # something in it: the request failed
SUCCESSES = ("success", "ok")  # false: the request failed
STATUSES = ("status", "finish_reason", "stop_reason")
FAILED_STATUSES = ("error", "failed", "abort", "aborted", "cancelled", "canceled", "timeout")
CHARACTERS_A_TOKEN = 4  # of English text under usual tokenizers; an estimate
MAGIC_GZIP, MAGIC_PARQUET = b"\x1f\x8b", b"PAR1"
MAGIC_ARCHIVE = b"PK\x03\x04"  # what `torch.save` writes


class TraceError(ValueError):
    """A trace that cannot be used; one line with file, row and field."""


@dataclass(frozen=True)
class Request:
    """One row. Lengths are as they are written there; None where there is no such column."""

    row: int
    lengths: Mapping[str, Any]
    group: str | None
    step: int | None
    weight: Any
    failed: bool


@dataclass(frozen=True)
class Requests:
    """All rows, and which lengths are estimates from text."""

    rows: tuple[Request, ...]
    estimated: tuple[str, ...]


def read_requests(path: Path) -> Requests:
    """Raises `TraceError` naming the file, and what it has where it lacks a length of responses."""
    rows = [row for part in parts_of(path) for row in _records(part, _unpacked(part))]
    if not rows:
        raise TraceError(f"{path}: has no rows")
    names = {name: None for row in rows for name in row}
    columns = {field: next((one for one in known if one in names), None) for field, known in NAMES.items()}
    texts = {
        field: None if columns[field] else next((one for one in known if one in names), None)
        for field, known in TEXTS.items()
    }
    if columns["output_tokens"] is None and texts["output_tokens"] is None:
        accepted = ", ".join([*NAMES["output_tokens"], *TEXTS["output_tokens"]])
        raise TraceError(
            f"{path}: no column 'output_tokens', nor another that says how long responses are; it has "
            f"{', '.join(names)}. Accepted, in any case: {accepted}"
        )
    by_prompt = _prompt_that_groups(rows, columns, texts)
    found = []
    for number, row in enumerate(rows, start=1):
        lengths = {
            field: row.get(column) if (column := columns[field]) else _estimate(row.get(texts[field] or ""))
            for field in LENGTHS
            if columns[field] or texts[field]
        }
        both = row.get("tokens")  # of prompt and response, as slime has them
        if columns["input_tokens"] is None and columns["output_tokens"] and isinstance(both, list):
            lengths["input_tokens"] = max(1, len(both) - int(row.get(columns["output_tokens"]) or 0))
        group, step = (row.get(columns[field] or "") for field in ("group_id", "step"))
        if by_prompt:
            group = row[by_prompt]
        elif columns["group_id"] == "uid":
            group = SAMPLE_OF_UID.sub("", str(group))
        found.append(
            Request(
                number, lengths, None if group in (None, "") else str(group), _step(path, number, step),
                row.get(columns["probability"]) if columns["probability"] else 1.0, _failed(row),
            )
        )  # fmt: skip
    return Requests(tuple(found), tuple(field for field, text in texts.items() if text))


def _prompt_that_groups(
    rows: list[dict[str, Any]], columns: Mapping[str, str | None], texts: Mapping[str, str | None]
) -> str | None:
    """The field with the prompt's text, where rows have no group but prompts come again: samples of one."""
    prompt = texts["input_tokens"]
    if columns["group_id"] or prompt is None or texts["output_tokens"] is None:
        return None
    asked = [row.get(prompt) for row in rows]
    if not all(isinstance(one, str) and one for one in asked) or len(set(asked)) == len(asked):
        return None
    return prompt


def parts_of(path: Path) -> list[Path]:
    """A file, or the files of a folder in the order of the numbers in their names: one a step, mostly."""
    if not path.is_dir():
        return [path]
    found = [part for part in path.rglob("*") if part.is_file() and not part.name.startswith(".")]
    return sorted(found, key=lambda part: ([int(n) for n in re.findall(r"\d+", part.name)], part.name))


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if data.startswith(MAGIC_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}: not a whole gzip file ({error})") from None
    if data.startswith(MAGIC_ARCHIVE):
        raise TraceError(
            f"{path}: an archive as torch.save writes it can run code when it is read; save its samples as "
            "JSONL"
        )
    return data


def _records(path: Path, data: bytes) -> Iterator[dict[str, Any]]:
    """Rows with names in lower case and underscores."""
    if data.startswith(MAGIC_PARQUET):
        for record in _parquet(path, data):
            yield from _spread(_named(record))
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: neither text nor Parquet ({error.reason} at byte {error.start})") from None
    if text.lstrip()[:1] in ("[", "{"):
        for record in _json(path, text):
            yield from _spread(_named(record))
    else:
        yield from _csv(path, text)


def _named(record: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub(r"[\s\-.]+", "_", str(name).strip()).lower(): value for name, value in record.items()}


def _parquet(path: Path, data: bytes) -> list[dict[str, Any]]:
    import pandas as pd

    try:
        return pd.read_parquet(io.BytesIO(data)).to_dict("records")  # type: ignore[return-value]
    except (ValueError, OSError) as error:
        raise TraceError(f"{path}: {str(error).splitlines()[0]}") from None


def _json(path: Path, text: str) -> Iterator[dict[str, Any]]:
    """A list of objects, one object, or an object a line."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict) and not _is_row(whole):  # samples below a key, as slime has them
        inside = next((value for value in whole.values() if _are_objects(value)), None)
        whole = inside if inside is not None else whole
    if whole is not None:
        listed = whole if isinstance(whole, list) else [whole]
        if listed and all(isinstance(one, list) for one in listed):  # a list of conversations
            listed = [request for one in listed for request in one]
        yield from _objects(path, listed)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield from _objects(path, [json.loads(line)])
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}:{number}: not JSON: {error.msg}") from None


def _is_row(record: Mapping[str, Any]) -> bool:
    known = {*NAMES["output_tokens"], *TEXTS["output_tokens"], "conversations", "conversation", "seqlen"}
    return bool(known & _named(record).keys())


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _objects(path: Path, values: list[Any]) -> Iterator[dict[str, Any]]:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise TraceError(f"{path}: entry {number} is no object")
        yield value


def _spread(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One object may be many requests: a list a column, turns of a conversation, requests inside of one."""
    turns = record.get("conversations", record.get("conversation"))
    if isinstance(turns, list | np.ndarray):  # ShareGPT, LMSYS-Chat
        asked = ""
        for turn in (turn for turn in turns if isinstance(turn, dict)):
            text = str(turn.get("value", turn.get("content", "")))
            if turn.get("from", turn.get("role")) in SPEAKERS:
                yield {"prompt": asked, "response": text}
            asked += text
        return
    inside = record.get("sub_requests")
    if isinstance(inside, list):
        for one in inside:
            yield _named(one)
        return
    columns = [name for name in NAMES["output_tokens"] if isinstance(record.get(name), list)]
    counted = any(name in record for name in NAMES["output_tokens"] if name.endswith("_count"))
    if not columns or counted:
        yield _derived(record)
        return
    count = len(record[columns[0]])
    lists = {name: value for name, value in record.items() if isinstance(value, list) and len(value) == count}
    for index in range(count):
        yield {name: value[index] for name, value in lists.items()}


def _derived(record: dict[str, Any]) -> dict[str, Any]:
    """Lengths that follow from others: AReaL counts prompt and all, NeMo-RL marks what was generated."""
    if isinstance(record.get("version_rle"), list):  # how many tokens each version wrote
        return {**record, "output_len": sum(count for _, count in record["version_rle"])}
    if isinstance(record.get("seqlen"), int) and isinstance(record.get("prompt_len"), int):
        return {**record, "output_len": record["seqlen"] - record["prompt_len"]}
    mask = record.get("token_loss_mask")
    if isinstance(mask, list) and mask:
        marks = mask[0] if isinstance(mask[0], list) else mask
        generated = sum(map(bool, marks))
        whole = record.get("input_lengths")
        read = (whole[0] if isinstance(whole, list) and whole else len(marks)) - generated
        return {**record, "output_len": generated, "input_len": read, "input_lengths": None}
    count = {name: record[name] for name in record if name.endswith("_token_count")}
    return {**{name: value for name, value in record.items() if not isinstance(value, list) or not count}}


def _csv(path: Path, text: str) -> Iterator[dict[str, Any]]:
    first = text.lstrip("\n").splitlines()[:1]
    delimiter = max(",\t;|", key=first[0].count) if first else ","
    for row in csv.DictReader(io.StringIO(text), delimiter=delimiter):
        yield _named({name: value for name, value in row.items() if name is not None})


def _estimate(text: Any) -> Any:
    """Tokens of a text, or of the messages of a chat; what is no text is left as it is."""
    if isinstance(text, list):
        text = "".join(str(one.get("content", "")) if isinstance(one, dict) else str(one) for one in text)
    return -(-len(text) // CHARACTERS_A_TOKEN) if isinstance(text, str) else text


def _step(path: Path, row: int, value: Any) -> int | None:
    if value is None or value == "":
        return None
    try:
        return int(float(value))
    except (TypeError, ValueError):
        raise TraceError(f"{path}: row {row}: its step is {value!r}, not a number") from None


def _failed(row: Mapping[str, Any]) -> bool:
    if any(row.get(name) not in (None, "", False, 0, "0", "None", "nan") for name in FAILURES):
        return True
    if any(str(row[name]).lower() in ("false", "0") for name in SUCCESSES if row.get(name) is not None):
        return True
    return any(str(row.get(name, "")).lower() in FAILED_STATUSES for name in STATUSES)

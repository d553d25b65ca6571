"""Events are written and read by one definition, and the documentation names all of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems import events
from systems.events import (
    KINDS,
    Decision,
    Event,
    LeaseUpdated,
    LeaseUpdating,
    RunBegan,
    SequenceFinished,
    decode,
    encode,
)
from tests.conftest import simulate, small_spec

JSON = st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2)
FINITE = st.floats(allow_nan=False, allow_infinity=False)  # what JSON can hold; nothing else is logged
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    float: FINITE,
    float | None: st.none() | FINITE,
    dict[str, float] | None: st.none() | st.dictionaries(st.text(max_size=4), FINITE, max_size=2),
    dict[str, Any]: JSON,
    dict[str, int]: JSON,
    dict[str, float]: JSON,
    tuple[dict[str, float], ...]: st.lists(JSON, max_size=2).map(tuple),
}


def anything_of(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(cls)
    types = {one.name: hints[one.name] for one in dataclasses.fields(cls)}
    values = {name: BY_TYPE[kind] if kind in BY_TYPE else st.from_type(kind) for name, kind in types.items()}
    return st.builds(cls, **values)


@given(st.sampled_from(list(KINDS.values())).flatmap(anything_of))
def test_every_event_survives_its_line(event: Event) -> None:
    line = json.dumps(encode(event), allow_nan=False)
    assert decode(json.loads(line)) == event
    assert list(json.loads(line))[:2] == ["t", "kind"]


def test_every_event_of_a_run_survives_its_line() -> None:
    log, _, _ = simulate(small_spec(steps=2))
    for event in log.happened:
        line = orjson.dumps(encode(event), option=orjson.OPT_NON_STR_KEYS)
        again = decode(orjson.loads(line))
        assert orjson.dumps(encode(again)) == line
        assert isinstance(event, Decision | RunBegan) or again == event


def test_events_with_equal_fields_differ_by_kind() -> None:
    assert LeaseUpdating(t_ns=0, lease=1, version=2) != LeaseUpdated(t_ns=0, lease=1, version=2)


FINISHED = {
    "t": 1, "kind": "sequence.finished", "sequence": 2, "role": "rollout", "lease": 3, "tokens": 4,
    "oldest": 0, "segments": 1,
}  # fmt: skip


def test_what_is_not_known_is_left_out_of_a_line() -> None:
    event = decode(FINISHED)
    assert isinstance(event, SequenceFinished)
    assert event.end is None
    assert encode(event) == FINISHED
    assert encode(decode({**FINISHED, "end": "stop"})) == {**FINISHED, "end": "stop"}


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({**FINISHED, "kind": "sequence.ended"}, ValueError),
        ({**FINISHED, "color": 1}, ValueError),
        ({**FINISHED, "role": "cook"}, ValueError),
        ({key: value for key, value in FINISHED.items() if key != "tokens"}, LookupError),
        ({key: value for key, value in FINISHED.items() if key != "kind"}, LookupError),
        ({key: value for key, value in FINISHED.items() if key != "t"}, LookupError),
    ],
)
def test_what_is_no_event_is_refused(raw: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(raw)


def test_the_documentation_names_every_kind_and_every_key() -> None:
    text = (Path(events.__file__).parents[1] / "docs" / "results-format.md").read_text()
    table = text[text.index("## events.jsonl") : text.index("## summary.json")]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = {name: row for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert documented.keys() == KINDS.keys()
    for kind, cls in KINDS.items():
        keys = [one.metadata.get("key", one.name) for one in dataclasses.fields(cls) if one.name != "t_ns"]
        missing = [key for key in keys if f"`{key}`" not in documented[kind].split("|")[2]]
        assert not missing, f"{kind}: {missing}"

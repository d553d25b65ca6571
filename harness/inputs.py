"""TOML files that people write: read into a checked form, or refused in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.errors import UsageError

M = TypeVar("M", bound=BaseModel)
WHERE = re.compile(r" \(at line (\d+), column \d+\)$")  # the end of what `tomllib` says


def parsed(text: str, said: str) -> dict[str, Any]:
    """The tables of a TOML text. `said` is the file as a message names it. Raises `UsageError`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = WHERE.search(str(error))
        line = f":{found.group(1)}" if found else ""
        raise UsageError(f"{said}{line}: {str(error)[: found.start() if found else None].lower()}") from None


def read_toml(path: Path, form: type[M], option: str = "") -> M:
    """A file in its form. `option` is what it was given with, for the message. Raises `UsageError`."""
    said = f"{option} {path}".lstrip()
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{said}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{said}: {error}") from None
    try:
        return form.model_validate(parsed(text, said))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{said}: {where}: {first['msg'].lower()}") from None

"""Files of what a server answered: a line that says who answered, then an answer a line. Never imports torch.

    {"outpace_records": 1, "target": {...}, "engine": {...}, "drafters": [...]}
    {"prompt_token_ids": [...], "token_ids": [...]}

`target` is an identity (`train.identity`), `engine` settings that a run on these answers needs, `drafters` who drafted.
A server that is writing, or was killed, may leave half a line at the end of its last file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, CheckpointError

__all__ = [
    "FORMAT",
    "HEADER",
    "PATTERN",
    "SERVED_AS",
    "head_of",
    "header_of",
    "is_header",
    "json_line",
    "lines_of",
    "newest_header",
    "record_files",
]

HEADER = "outpace_records"
"""Key of the first line; its value is the number of the format."""
FORMAT = 1
SERVED_AS = {"eagle3": ("eagle3", "model"), "early-exit": ("early_exit", "adapter")}
"""{kind of drafter that can be trained on: (method it is served by, setting that names its folder)}."""
PATTERN = "answers-*.jsonl"
"""Names of the files; they sort by the time at which they were begun."""


def is_header(value: Mapping[str, Any]) -> bool:
    """Whether a line says who answered."""
    return HEADER in value


def record_files(folder: Path) -> list[Path]:
    """The files of a folder, the oldest first."""
    return sorted(folder.glob(PATTERN))


def header_of(path: Path) -> dict[str, Any] | None:
    """What the first line says; None if the file is none of a server's, or has no whole line yet.

    Raises:
        CheckpointError: it is of another version.
        BadInput: it cannot be read, or its first line is damaged.
    """
    try:
        with path.open("rb") as file:
            first = file.readline()
        value = json.loads(first) if first.endswith(b"\n") else None
    except ValueError:
        return None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict) or not is_header(value):
        return None
    if value[HEADER] != FORMAT:
        raise CheckpointError(f"{path}: format {value[HEADER]!r} of recorded answers is not {FORMAT}: record anew")
    drafters = value.get("drafters", [])
    if not isinstance(drafters, list) or not all(_is_plain(each) for each in (value.get("engine", {}), *drafters)):
        raise BadInput(f"{path}, line 1 is damaged: it does not say who answered and drafted; take the file away")
    return value


def _is_plain(value: object) -> bool:
    """Whether it is an object of texts, as settings of engine and drafters are written."""
    return isinstance(value, dict) and all(item is None or isinstance(item, str) for item in value.values())


def newest_header(folder: Path) -> dict[str, Any]:
    """Who gave the newest answers of a folder.

    Raises:
        BadInput: there are none.
        CheckpointError: they are of another version.
    """
    for path in reversed(record_files(folder)):
        found = header_of(path)
        if found is not None:
            return found
    raise BadInput(f"{folder} holds no answers that `outpace serve --record {folder}` has written")


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, value) of every whole line behind the first, the newest first.

    Raises:
        BadInput: a line is not JSON, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    lines.pop()  # nothing, or what was not written to its end
    for number in range(len(lines), 1, -1):
        line = lines[number - 1]
        lines.pop()
        yield number, json_line(path, number, line)


def json_line(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    """The object in a line of a file.

    Raises:
        BadInput: naming the line, which is not JSON or something else.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{path}, line {number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}, line {number}: a JSON object is needed, not {line.strip()[:60]!r}")
    return value


def head_of(header: Mapping[str, Any], kind: str | None = None) -> tuple[str, str] | None:
    """(kind, folder or hub id) of the trained drafter that a server used, of this kind if one is named; None: none."""
    for drafter in header.get("drafters", ()):
        for name, (method, key) in SERVED_AS.items():
            if drafter.get("method") == method and drafter.get(key) is not None and kind in (None, name):
                return name, str(drafter[key])
    return None

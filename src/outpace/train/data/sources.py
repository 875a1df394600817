"""Where prompts and texts come from: files, folders, data sets, and what every machine has.

prompts   builtin, FILE.jsonl (a prompt or a conversation a line), FOLDER of such files, datasets:ID[:SPLIT]
text      stdlib (Python's own source), docs (/usr/share/doc), FILE, FOLDER; of folders without licences and changelogs
records   FILE.jsonl or FOLDER with prompt_token_ids and token_ids a line: what a model has said already; among them
          files of `outpace serve --record`, which say which model that was
"""

from __future__ import annotations

import importlib
import itertools
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.errors import BadInput, CheckpointError, OutpaceError
from outpace.models.checkpoint import first_line
from outpace.train.data.builtin import builtin_prompts
from outpace.train.data.recorded import PATTERN, header_of, json_line, lines_of
from outpace.train.identity import Identity

__all__ = ["Conversation", "lasting_source", "read_prompts", "read_records", "read_texts"]

Conversation = Sequence[Mapping[str, Any]]
"""Messages: {"role": ..., "content": ...} each."""

_TEXT_KINDS = frozenset(
    (".py", ".md", ".txt", ".rst", ".html", ".js", ".ts", ".go", ".rs", ".c", ".h", ".java", ".json", "")
)
_BUILT_IN = {"prompts": ("builtin",), "text": ("stdlib", "docs")}
_HUB = "datasets:"
_LONGEST_FILE = 1 << 20
_LEFT_OUT = frozenset(("site-packages", "test", "tests", "idle_test"))
"""Folders of the standard library: other people's, and tests, which are more than half of it and much alike."""
_ABOUT_RIGHTS = re.compile(r"(copyright|licen[cs]e|copying|changelog)", re.IGNORECASE)
"""Files that say the same wherever they lie, or list changes."""
_PLAIN = ("prompt", "instruction", "question", "query", "input", "text")
_TALKS = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def lasting_source(kind: str, source: str) -> str:
    """The same source by a name that means it from any folder.

    Args:
        kind: prompts, text or records.
        source: as above.
    """
    path = Path(source).expanduser()
    if source in _BUILT_IN.get(kind, ()) or source.startswith(_HUB) or not path.exists():
        return source
    return str(path.resolve())


def read_prompts(sources: Sequence[str], count: int, seed: int) -> Iterator[Conversation]:
    """Conversations from all sources, one source after the other.

    Args:
        sources: as above.
        count: most conversations.
        seed: of built-in prompts.

    Raises:
        BadInput: a source is not there, or a line is no prompt; names file and line.
    """
    for source in sources:
        for conversation in _prompts_of(source, count, seed):
            if count <= 0:
                return
            count -= 1
            yield conversation


def read_texts(sources: Sequence[str], seed: int) -> Iterator[str]:
    """Texts of all sources, files in an order that the seed decides.

    Raises:
        BadInput: a source is not there.
    """
    files: list[Path] = []
    for source in sources:
        files += _text_files(source)
    random.Random(seed).shuffle(files)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            continue  # among thousands of files some are no text, or not for us to read
        if text.strip() and "\0" not in text:
            yield text


def read_records(
    source: str, target: Identity, notify: Callable[[str], None] | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of what was said before; of what a server has recorded, the newest first.

    Args:
        source: as above.
        target: who has to have said it, where a file tells: the files of others are left out.
        notify: is told how many those are.

    Raises:
        BadInput: the source is not there, or a line holds something else; names file and line.
        CheckpointError: all of it was said by others.
    """
    files = _json_files(source)
    recorded = [path for path in files if path.match(PATTERN)]
    found: list[tuple[Path, bool]] = []
    foreign: list[CheckpointError] = []
    for path in [*(path for path in files if path not in recorded), *reversed(recorded)]:
        try:
            header = header_of(path)
            if header is not None:
                target.require(header.get("target"), str(path))
            found.append((path, header is not None))
        except CheckpointError as error:
            foreign.append(error)
    if foreign and not found:
        raise foreign[0]
    if foreign and notify is not None:
        notify(
            f"{len(foreign)} of {len(files)} files of recorded answers are left out, the first because: {foreign[0]}"
        )
    for path, has_header in found:
        for number, value in lines_of(path) if has_header else _json_lines(path):
            ids = [value.get(key) for key in ("prompt_token_ids", "token_ids")]
            if not all(isinstance(item, list) and all(type(i) is int and i >= 0 for i in item) for item in ids):
                raise BadInput(f"{path}, line {number}: prompt_token_ids and token_ids must be lists of token ids")
            yield ids[0], ids[1]  # type: ignore[misc]


def _prompts_of(source: str, count: int, seed: int) -> Iterator[Conversation]:
    if source == "builtin":
        yield from ([{"role": "user", "content": text}] for text in builtin_prompts(count, seed))
        return
    if source.startswith(_HUB):
        yield from _from_hub(source)
        return
    for path in _json_files(source):
        for number, value in _json_lines(path):
            yield _conversation(value, f"{path}, line {number}")


def _from_hub(source: str) -> Iterator[Conversation]:
    """Rows of a data set on the hub, as they are streamed."""
    _, name, *rest = source.split(":")
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise BadInput(f"{source} needs the package datasets: pip install outpace[train]") from None
    split = rest[0] if rest else "train"
    try:
        rows = iter(library.load_dataset(name, split=split, streaming=True))
        for number in itertools.count(1):
            row = next(rows, None)  # this is where it is downloaded, piece by piece
            if row is None:
                return
            yield _conversation(row, f"{source}, row {number}")
    except OutpaceError:
        raise
    except Exception as error:  # the library raises whatever its many backends raise
        raise BadInput(f"{source} cannot be loaded ({first_line(error)}): datasets:ID or datasets:ID:SPLIT") from error


def _conversation(value: Mapping[str, Any], place: str) -> Conversation:
    """One line's messages, whichever usual key they stand under."""
    for key in _TALKS:
        if isinstance(value.get(key), list) and value[key]:
            return [_message(item, place) for item in value[key]]
    for key in _PLAIN:
        if isinstance(value.get(key), str) and value[key].strip():
            return [{"role": "user", "content": value[key]}]
    raise BadInput(
        f"{place}: no prompt; one of {', '.join((*_TALKS, *_PLAIN))} is needed, found {', '.join(value) or 'nothing'}"
    )


def _message(item: Any, place: str) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise BadInput(f'{place}: a message must be {{"role": ..., "content": ...}}, not {item!r:.80}')


def _json_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.rglob("*.jsonl"))
        if not found:
            raise BadInput(f"folder {path} holds no .jsonl file")
        return found
    if not path.is_file():
        raise BadInput(f"{source!r} is no source: builtin, a .jsonl file, a folder of them, or datasets:ID")
    return [path]


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json_line(path, number, line)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"{path} cannot be read as JSON lines: {error}") from error


def _text_files(source: str) -> list[Path]:
    if source == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        found = [path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts)]
    elif source == "docs":
        found = [path for path in Path("/usr/share/doc").rglob("*") if path.suffix in _TEXT_KINDS]
    else:
        path = Path(source).expanduser()
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise BadInput(f"{source!r} is no text: stdlib, docs, a file or a folder")
        found = [item for item in path.rglob("*") if item.suffix in _TEXT_KINDS]
    found = [path for path in found if not _ABOUT_RIGHTS.match(path.name)]
    return sorted(path for path in found if path.is_file() and path.stat().st_size <= _LONGEST_FILE)

"""Writes the tables of docs/serving.md from the code:

python -m outpace.server.fields_page docs/serving.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from outpace.refused import REFUSED
from outpace.server.drafter import SwapRequest
from outpace.server.fields import Refusal
from outpace.server.requests import Body, ChatRequest, CompletionRequest, sampling_names
from outpace.server.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["tables", "with_tables"]

_BEGIN = "<!-- Written by `python -m outpace.server.fields_page docs/serving.md`; change the code, not this part. -->"
_END = "<!-- Here the written part ends. -->"


def tables() -> str:
    """What every field of every body means."""
    parts = [_own(body) for body in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, SwapRequest)]
    chat, completion = set(sampling_names(ChatRequest)), set(sampling_names(CompletionRequest))
    assert chat == completion
    names = ", ".join(f"`{name}`" for name in sampling_names(ChatRequest))
    parts.insert(
        0,
        "### Sampling parameters\n\nBoth kinds of generation take these, with the meanings and limits of "
        f"[parameters.md](parameters.md): {names}.\n",
    )
    parts.append(_ignored())
    refused = {**CompletionRequest._refused, **ChatRequest._refused}
    parts.append(_refused({name: item for name, item in refused.items() if REFUSED.get(name) is not item}))
    return "\n".join(parts)


def with_tables(page: str) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: it has no place for them.
    """
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {_BEGIN!r} and {_END!r}")
    return f"{head}{_BEGIN}\n\n{tables()}\n{_END}{tail}"


def _own(body: type[Body]) -> str:
    rows = ((f"`{name}`", str(field.description)) for name, field in body.model_fields.items())
    return f"### Fields of {body._path}\n\n" + _rows(("name", "meaning"), rows)


def _ignored() -> str:
    chat, both = ChatRequest._ignored, CompletionRequest._ignored
    rows = ((f"`{name}`" + " (chat)" * (name not in both), reason) for name, reason in sorted(chat.items()))
    return "### Ignored: they change no answer\n\n" + _rows(("name", "why"), rows)


def _refused(refused: Mapping[str, Refusal]) -> str:
    rows = (
        (f"`{name}`", item.reason, ", ".join(f"`{value!r}`" for value in item.neutral))
        for name, item in sorted(refused.items())
    )
    return (
        "### Refused by name\n\nBesides what [parameters.md](parameters.md) refuses; not every field exists at every "
        "path.\n\n" + _rows(("name", "why, and what instead", "passes"), rows)
    )


def _rows(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text("utf-8")), "utf-8")

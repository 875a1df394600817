"""What a parser of tool calls gives out, and how it is put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ContentDelta", "Delta", "ToolCall", "ToolDelta", "collect"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that belongs to no call; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """More of one call. The first of a call has `id` and `name`, complete; the others have None.

    Args:
        index: which call of the answer, from 0.
        id: what the answer to the call has to name.
        name: the tool's name.
        arguments: more of the text of the arguments, a JSON object.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ToolDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the text of a JSON object, cut off if the answer was."""

    id: str
    name: str
    arguments: str


def collect(deltas: Iterable[Delta]) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole answer."""
    content: list[str] = []
    begun: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.id is not None and delta.name is not None:
            begun.append((delta.id, delta.name))
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    calls = [ToolCall(*head, "".join(parts)) for head, parts in zip(begun, arguments, strict=True)]
    return "".join(content), calls

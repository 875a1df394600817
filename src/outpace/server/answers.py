"""Reads one answer as it grows: what is reasoning, what is content, what are tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.server.reasoning import ReasoningSplitter
from outpace.server.tools import ContentDelta, Delta, ToolCall, ToolDelta, ToolParser, collect

__all__ = ["Answer", "AnswerReader", "Growth"]


@dataclass(frozen=True, slots=True)
class Growth:
    """What became certain of an answer.

    Args:
        reasoning: more of its reasoning.
        content: more of its content.
        calls: more of its tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `reasoning` is None where the model marks none."""

    reasoning: str | None
    content: str
    calls: list[ToolCall]


class AnswerReader:
    """Splits one answer.

    Args:
        splitter: takes reasoning apart; None where there is none to be told.
        parser: reads calls; None if all text is content.
    """

    def __init__(self, splitter: ReasoningSplitter | None = None, parser: ToolParser | None = None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.has_calls = False

    def push(self, text: str, *, last: bool = False) -> Growth:
        """More text; returns what became certain by it: everything, if it is the last."""
        reasoning, content = ("", text) if self._splitter is None else self._splitter.push(text)
        if last and self._splitter is not None:
            more_reasoning, more_content = self._splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._parser is None:
            return Growth(reasoning, content)
        deltas: list[Delta] = self._parser.push(content) if content else []
        if last:
            deltas += self._parser.finish()
        calls = tuple(delta for delta in deltas if isinstance(delta, ToolDelta))
        self.has_calls = self.has_calls or bool(calls)
        return Growth(reasoning, "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)), calls)

    def read(self, text: str) -> Answer:
        """A whole answer at once."""
        growth = self.push(text, last=True)
        _, calls = collect(growth.calls)
        return Answer(None if self._splitter is None else growth.reasoning, growth.content, calls)

"""Splits what a model thinks from what it answers.

A grammar (`structured_outputs`, forced tool calls) holds for the whole text, reasoning included: one that begins behind
the reasoning is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import InvalidParameter

__all__ = ["REASONING_FORMATS", "ReasoningSplitter", "check_reasoning", "detect_reasoning", "make_splitter"]


@dataclass(frozen=True, slots=True)
class _Marks:
    opening: str
    closing: str


_THINK = _Marks("<think>", "</think>")
_FORMATS = {"deepseek_r1": _THINK, "qwen3": _THINK, "kimi": _Marks("◁think▷", "◁/think▷")}
REASONING_FORMATS = tuple(_FORMATS)
"""Names of the formats, as for vLLM's `--reasoning-parser`."""

_BLANKS = " \t\r\n"


def check_reasoning(name: str) -> str:
    """The name, if it is one.

    Raises:
        InvalidParameter: listing those there are.
    """
    if name not in _FORMATS:
        raise InvalidParameter(f"reasoning_parser={name!r} is not known: there are {', '.join(REASONING_FORMATS)}")
    return name


def detect_reasoning(chat_template: str) -> str | None:
    """How a model with this template marks its reasoning; None if it shows no marks."""
    if _FORMATS["kimi"].closing in chat_template:
        return "kimi"
    if _THINK.closing not in chat_template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in chat_template else "qwen3"


def make_splitter(name: str, prompt: str) -> ReasoningSplitter:
    """A fresh splitter for one answer to this prompt.

    Args:
        name: one of `REASONING_FORMATS`.
        prompt: the text the model was given, or its end: a template may have opened the reasoning there.

    Raises:
        InvalidParameter: there is no such format.
    """
    marks = _FORMATS[check_reasoning(name)]
    opened = prompt.rstrip(_BLANKS).endswith(marks.opening)
    return ReasoningSplitter(marks.opening, marks.closing, opened=opened)


class ReasoningSplitter:
    """Takes an answer piece by piece. The reasoning is what stands between two marks at its beginning, if anything.

    The parts are the same however the text is cut into pieces. Line breaks next to a mark belong to the mark. Marks
    further down are content. Reasoning that is never closed is reasoning to the end.

    Args:
        opening: begins the reasoning; blanks may come before it.
        closing: ends it.
        opened: the prompt has the opening mark already; the model may repeat it.
    """

    def __init__(self, opening: str = _THINK.opening, closing: str = _THINK.closing, *, opened: bool = False) -> None:
        self._opening = opening
        self._closing = closing
        self._opened = opened
        self._state = "beginning"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """More text of the answer; (reasoning, content) that became certain by it, either may be empty."""
        self._held += text
        reasoning = ""
        if self._state == "beginning":
            self._begin()
        if self._state == "reasoning":
            reasoning = self._reason()
        if self._state == "behind" and self._held.strip("\n"):
            self._held = self._held.lstrip("\n")
            self._state = "content"
        content = ""
        if self._state == "content":
            content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The answer is over; (reasoning, content) that was held back."""
        held, self._held = self._held, ""
        inside = self._state == "reasoning" or (self._state == "beginning" and self._opened)
        if self._state == "behind":
            held = ""
        self._state = "content"
        return (held, "") if inside else ("", held)

    def _begin(self) -> None:
        """Looks for the opening mark; stays at the beginning as long as it may still come."""
        text = self._held.lstrip(_BLANKS)
        if self._opening.startswith(text) and text != self._opening:
            return
        if text.startswith(self._opening):
            self._state, self._held = "reasoning", text[len(self._opening) :]
        else:
            self._state = "reasoning" if self._opened else "content"
        self._first = True

    def _reason(self) -> str:
        """Takes reasoning off the held text, up to the closing mark or to what may be part of it."""
        if self._first:
            self._held = self._held.lstrip("\n")
            self._first = not self._held
        text, mark, behind = self._held.partition(self._closing)
        if mark:
            self._state, self._held = "behind", behind
            return text.rstrip("\n")
        certain = _certain(text, self._closing)
        self._held = text[certain:]
        return text[:certain]


def _certain(text: str, mark: str) -> int:
    """How many characters cannot be line breaks before a mark, or its beginning."""
    longest = min(len(text), len(mark) - 1)
    size = next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)
    return len(text[: len(text) - size].rstrip("\n"))

"""Text of one request as it grows: detokenising, stop strings, and what may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from outpace.engine.outputs import Piece

__all__ = ["Detokenizer", "TextBuilder"]


class Detokenizer(Protocol):
    """Turns token ids into text, append-only."""

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class TextBuilder:
    """Collects pieces and finds stop strings; a piece is released once no stop string can still claim it.

    Args:
        detokenizer: a fresh one, for this request alone.
        stop: strings that end the text, not empty.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self._longest = max((len(s) for s in self._stop), default=0)

    def push(self, token_id: int, source: str | None) -> str | None:
        """Adds one token; returns the stop string it completed, if any, and then the text ends before it."""
        return self._append(self._detokenizer.push(token_id), token_id, source)

    def push_silent(self, token_id: int, source: str | None) -> None:
        """Adds a token that has no text of its own: EOS or a stop token."""
        self._held.append(Piece("", token_id, source))

    def finish(self) -> str | None:
        """Ends the text, right after its last token: adds what was held back; a stop string in it still counts."""
        rest = self._detokenizer.flush()
        if not rest:
            return None
        last = self._held.pop()
        return self._append(rest, last.token_id, last.source, before=last.text)

    def release(self, *, final: bool) -> tuple[Piece, ...]:
        """Pieces that can be shown: all of them at the end, else those no stop string can reach back into."""
        keep = 0 if final or not self._stop else self._claimable()
        count, tail = len(self._held), 0
        while count and keep and tail < keep:
            count -= 1
            tail += len(self._held[count].text)
        released, self._held = tuple(self._held[:count]), self._held[count:]
        return released

    def _append(self, new: str, token_id: int, source: str | None, before: str = "") -> str | None:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += new
        self._held.append(Piece(before + new, token_id, source))
        if not new or not self._stop:
            return None
        # The earliest end wins: it is the one a reader of single characters would have met first.
        ends = [(at + len(s), -len(s), s) for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if not ends:
            return None
        end, _, stop = min(ends)
        self._cut(end - len(stop))
        return stop

    def _cut(self, length: int) -> None:
        """Shortens the text, and the held pieces with it; released pieces are never reached."""
        excess = len(self.text) - length
        self.text = self.text[:length]
        for index in range(len(self._held) - 1, -1, -1):
            if excess <= 0:
                break
            piece = self._held[index]
            taken = min(excess, len(piece.text))
            self._held[index] = replace(piece, text=piece.text[: len(piece.text) - taken])
            excess -= taken

    def _claimable(self) -> int:
        """Length of the longest tail of the text that begins some stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0

"""Text of one request as it grows: detokenising, stop strings, and what may be shown already."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from outpace.engine.outputs import Piece, TokenLogprobs
from outpace.engine.stop_strings import stop_strings
from outpace.protocols import Detokenizer

__all__ = ["Detokenizer", "TextBuilder"]


class TextBuilder:
    """Collects pieces and finds stop strings; a piece is released once no stop string can still claim it.

    A stop string is found at its last character, whatever tokens it comes in: the one that ends first counts, the
    longest if several end there. The text ends before it, or right behind it with `include_stop`.

    Args:
        detokenizer: a fresh one, for this request alone.
        stop: strings that end the text, none of them empty.
        include_stop: the stop string, and the text of a stop token, belong to the text.
        min_tokens: stop strings that end in the text of one of the first `min_tokens` tokens do not count.

    Raises:
        InvalidParameter: the stop strings are too long, all together.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._num_tokens = 0
        self._found: str | None = None
        # A piece is held while a stop string may claim it, then settled, and shown with the next settled text.
        self._held: deque[Piece] = deque()
        self._held_characters = 0
        self._settled: list[Piece] = []
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text so far, shown or not."""
        self._shown = ["".join(self._shown)]
        return self._shown[0] + "".join(piece.text for piece in [*self._settled, *self._held])

    def push(self, token_id: int, source: str | None, logprobs: TokenLogprobs | None = None) -> str | None:
        """Adds one token; returns the stop string that ends in its text, if any: then the text ends there."""
        self._num_tokens += 1
        return self._append(Piece("", token_id, source, logprobs), self._detokenizer.push(token_id))

    def push_stop(self, token_id: int, source: str | None, logprobs: TokenLogprobs | None = None) -> None:
        """Adds the token that ends the text, EOS or a stop token.

        It has text only with `include_stop`; a stop string that ends in this text is what `finish` returns.
        """
        self._num_tokens += 1
        self._append(
            Piece("", token_id, source, logprobs), self._detokenizer.push(token_id) if self._include_stop else ""
        )

    def finish(self) -> str | None:
        """Ends the text, right after its last token: what the detokenizer held back belongs to this token.

        Returns:
            The stop string that the text ends at, if any; one in the text held back still counts.
        """
        if self._found is None and (last := self._take_last()) is not None:
            self._append(last, self._detokenizer.flush())
        return self._found

    def release(self, *, final: bool) -> tuple[Piece, ...]:
        """Pieces that can be shown: all at the end, else those no stop string can reach back into.

        Unless it is the end, there is text in them: pieces without text wait for the next that has some.
        """
        ended = final or self._found is not None
        claimed = 0 if ended or self._stops is None else self._stops.claim(self._state)
        if not self._settle(claimed) and not final:
            return ()
        released, self._settled = tuple(self._settled), []
        self._shown += [piece.text for piece in released]
        return released

    def _append(self, piece: Piece, new: str) -> str | None:
        """Adds a piece with its new text behind the text it has; returns the stop string that ends there."""
        self._held.append(replace(piece, text=piece.text + new) if new else piece)
        self._held_characters += len(piece.text) + len(new)
        if not new or self._stops is None:
            return None
        armed = self._num_tokens > self._min_tokens
        self._state, end, self._found = self._stops.scan(self._state, new, armed=armed)
        if self._found is not None:
            self._cut(len(new) - end + (0 if self._include_stop else len(self._found)))
        return self._found

    def _take_last(self) -> Piece | None:
        """The newest piece, if it was not shown yet."""
        if self._held:
            last = self._held.pop()
            self._held_characters -= len(last.text)
            return last
        return self._settled.pop() if self._settled else None

    def _cut(self, excess: int) -> None:
        """Takes characters from the end of the text. What a stop string can claim is held: no shown piece changes."""
        self._held_characters -= excess
        for index in range(len(self._held) - 1, -1, -1):
            if not excess:
                return
            piece = self._held[index]
            kept = max(0, len(piece.text) - excess)
            excess -= len(piece.text) - kept
            self._held[index] = replace(piece, text=piece.text[:kept])

    def _settle(self, claimed: int) -> int:
        """Settles the pieces that end before the last `claimed` characters of the text; returns their characters.

        What was settled before and not shown has none.
        """
        before = self._held_characters
        while self._held and self._held_characters - len(self._held[0].text) >= claimed:
            piece = self._held.popleft()
            self._held_characters -= len(piece.text)
            self._settled.append(piece)
        return before - self._held_characters

"""What the parsers of all formats share: a reader that stands still between two characters.

A format's `_read` is written as if the whole text lay before it: `yield` is the next character, "" the end of the text.
So a result depends on the text alone, never on the pieces in which it came. What may turn out to be no call is recorded
and, if it is none, read again as content.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import ClassVar, TypeVar

from outpace.server.tool_formats.deltas import ContentDelta, Delta, ToolDelta
from outpace.server.tool_formats.json_text import BLANKS
from outpace.server.tool_requests import Tool

__all__ = ["Reading", "ToolParser", "call_id"]

_T = TypeVar("_T")
Reading = Generator[None, str, _T]
"""Takes characters by `send` and returns a result when it has read enough."""

_ID_CHARACTERS = string.ascii_letters + string.digits


def call_id() -> str:
    """An id as OpenAI's: "call_" and 24 random characters."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(24))


class ToolParser(ABC):
    """Splits an answer, piece by piece, into content and tool calls. One parser reads one answer.

    A call is given out as soon as it is beyond doubt: its name is complete, and its arguments are right up to their
    first value; the arguments then follow as they grow. A call that is found to be malformed before that comes back as
    content, character for character. One that breaks off later, or is cut by the end of the answer, keeps the arguments
    it has got, and what follows is content: nothing is invented to close them. With `whole` such a call is content too,
    and arguments are always JSON. Blanks before a call and behind the last one belong to nobody.

    Args:
        tools: what may be called.
        whole: calls are given out when their arguments are complete; for answers that nobody watches growing.
        forced: the answer was written under the grammar of this format.
        most_calls: calls beyond this many are read but not given out; None for no limit.
        new_id: makes the ids of calls.
    """

    markers: ClassVar[Sequence[str]]

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        whole: bool = False,
        forced: bool = False,
        most_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._whole = whole
        self._forced = forced
        self._most_calls = most_calls
        self._new_id = new_id or self._make_id
        self._calls = 0
        self._after_call = False
        self._call_is_open = False
        self._held_call: list[Delta] = []
        self._out: list[Delta] = []
        self._coming: deque[str] = deque()
        self._recorded: list[str] | None = None
        self._finished = False
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> list[Delta]:
        """More text of the answer; returns what became certain by it, neighbours of one kind joined.

        Raises:
            ValueError: the answer was finished.
        """
        self._feed(text)
        return self._taken()

    def finish(self) -> list[Delta]:
        """The answer is over; returns what was held back.

        Raises:
            ValueError: the answer was finished before.
        """
        self._feed([""])
        return self._taken()

    def _make_id(self) -> str:
        return call_id()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads a whole answer, up to the "" that ends it."""

    def _feed(self, characters: Iterable[str]) -> None:
        if self._finished:
            raise ValueError("this answer is finished: a parser reads one answer")
        self._coming.extend(characters)
        while self._coming:
            character = self._coming.popleft()
            if self._recorded is not None:
                self._recorded.append(character)
            try:
                self._reader.send(character)
            except StopIteration:
                self._finished = True
                return

    def _taken(self) -> list[Delta]:
        taken, self._out = self._out, []
        return taken

    # Giving out

    def _content(self, text: str) -> None:
        if not text:
            return
        self._after_call = False
        last = self._out[-1] if self._out else None
        if isinstance(last, ContentDelta):
            self._out[-1] = ContentDelta(last.text + text)
        else:
            self._out.append(ContentDelta(text))

    def _announce(self, name: str, arguments: str) -> None:
        """A call begins: from here on its text is not read again."""
        self._call_is_open = self._after_call = True
        self._calls += 1
        if not self._whole:
            self._recorded = None
        if self._most_calls is None or self._calls <= self._most_calls:
            (self._held_call if self._whole else self._out).append(
                ToolDelta(self._calls - 1, self._new_id(), name, arguments)
            )

    def _arguments(self, text: str) -> None:
        """More of the arguments of the call announced last."""
        index = self._calls - 1
        if not text or (self._most_calls is not None and self._calls > self._most_calls):
            return
        out = self._held_call if self._whole else self._out
        last = out[-1] if out else None
        if isinstance(last, ToolDelta) and last.index == index:
            out[-1] = ToolDelta(index, last.id, last.name, last.arguments + text)
        else:
            out.append(ToolDelta(index, None, None, text))

    def _complete(self) -> None:
        """The arguments of the call announced last are complete."""
        self._call_is_open = False
        self._recorded = None
        self._out += self._held_call
        self._held_call.clear()

    # Reading

    def _unread(self, characters: Sequence[str]) -> None:
        """Puts the characters read last back, the end of the text among them."""
        self._coming.extendleft(reversed(characters))
        if self._recorded is not None and characters:
            del self._recorded[-len(characters) :]

    def _attempt(self, lead: str, call: Reading[bool]) -> Reading[bool]:
        """Reads what may be a call. If none is announced, `lead` is content and what followed is read again."""
        self._recorded = []
        announced = yield from call
        recorded, self._recorded = self._recorded, None
        if not announced:
            self._content(lead)
            self._coming.extendleft(reversed(recorded or []))
        elif self._call_is_open and self._whole:
            # not read again: each call that stands in an argument of another would be read as often as it is deep
            self._held_call.clear()
            self._calls -= 1
            self._content(lead + "".join(recorded or []))
            announced = False
        self._call_is_open = False
        return announced

    def _until_marker(self) -> Reading[tuple[str, str]]:
        """Passes content on up to a marker; returns (blanks before it, the marker), or ("", "") at the end."""
        blanks = part = ""
        while True:
            character = yield
            if character and any(marker.startswith(part + character) for marker in self.markers):
                part += character
                if part in self.markers:
                    return blanks, part
            elif part:
                self._content(blanks + part[0])
                blanks, rest, part = "", [*part[1:], character], ""
                self._unread(rest)
            elif not character:
                self._content("" if self._after_call else blanks)
                return "", ""
            elif character in BLANKS:
                blanks += character
            else:
                self._content(blanks + character)
                blanks = ""

    def _blanks(self) -> Reading[str]:
        """Skips blanks; returns the character behind them, which is read too."""
        while (character := (yield)) and character in BLANKS:
            pass
        return character

    def _literal(self, *texts: str) -> Reading[str]:
        """Reads one of these texts, blanks before it included; "" if none comes, and then nothing is read."""
        read: list[str] = []
        found = ""
        while found not in texts:
            character = yield
            read.append(character)
            if not found and character and character in BLANKS:
                continue
            found += character
            if not character or not any(text.startswith(found) for text in texts):
                self._unread(read)
                return ""
        return found

    def _until(self, end: str, without: Collection[str]) -> Reading[str | None]:
        """Reads up to the character `end`, and that; None at one of `without` or the end of the text, left unread."""
        read = ""
        while (character := (yield)) != end:
            if not character or character in without:
                self._unread([character])
                return None
            read += character
        return read

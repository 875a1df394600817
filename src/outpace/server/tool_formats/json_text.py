"""Follows a JSON value character by character, so that what is legal can be passed on before the value ends."""

from __future__ import annotations

import json

__all__ = ["BLANKS", "JsonScanner"]

BLANKS = " \t\n\r"
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_WORDS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}
_NUMBER = {
    "minus": {"0": "zero", "digit": "whole"},
    "zero": {".": "point", "e": "power"},
    "whole": {"digit": "whole", "0": "whole", ".": "point", "e": "power"},
    "point": {"digit": "part", "0": "part"},
    "part": {"digit": "part", "0": "part", "e": "power"},
    "power": {"digit": "exponent", "0": "exponent", "sign": "sign"},
    "sign": {"digit": "exponent", "0": "exponent"},
    "exponent": {"digit": "exponent", "0": "exponent"},
}
_WHOLE_NUMBERS = ("zero", "whole", "part", "exponent")


class JsonScanner:
    """One JSON value of any depth; nothing is kept of it but what is open.

    Attributes:
        done: the value is complete. A number is done only with the first character behind it, which `feed` refuses.
        in_first_value: a value inside the outermost brackets has begun.
    """

    def __init__(self) -> None:
        self.done = False
        self.in_first_value = False
        self._open: list[str] = []
        self._expects = "value"
        self._is_key = False
        self._rest = ""  # of a word, or the state of a number, or the digits of \u that are still to come

    def feed(self, character: str) -> str | None:
        """Goes on by one character, "" standing for the end of the text.

        Returns:
            The character as valid JSON has it (control characters inside strings are escaped, as models forget to);
            None if it cannot come here. The scanner has then not moved, but a number may be done.
        """
        if self._expects == "number":
            if self._feed_number(character):
                return character
            if self._rest not in _WHOLE_NUMBERS:
                return None
            self._end_value()
        if self.done or not character:
            return None
        if self._expects == "string":
            return self._feed_string(character)
        if self._expects in ("escape", "hex", "word"):
            return character if self._feed_inside(character) else None
        if character in BLANKS:
            return character
        return character if self._feed_between(character) else None

    def _feed_number(self, character: str) -> bool:
        kind = {"E": "e", "+": "sign", "-": "sign"}.get(character, character)
        if character and character in _DIGITS[1:]:
            kind = "digit"
        following = _NUMBER[self._rest].get(kind)
        self._rest = following or self._rest
        return following is not None

    def _feed_string(self, character: str) -> str:
        if character == '"':
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
        elif character == "\\":
            self._expects = "escape"
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def _feed_inside(self, character: str) -> bool:
        if self._expects == "escape":
            if character == "u":
                self._expects, self._rest = "hex", "0000"
            elif character in '"\\/bfnrt':
                self._expects = "string"
            else:
                return False
            return True
        if character not in (_HEX if self._expects == "hex" else self._rest[0]):
            return False
        self._rest = self._rest[1:]
        if not self._rest and self._expects == "hex":
            self._expects = "string"
        elif not self._rest:
            self._end_value()
        return True

    def _feed_between(self, character: str) -> bool:
        expects = self._expects
        if self._open and character == _CLOSING[self._open[-1]] and expects in ("value or end", "key or end", "more"):
            self._open.pop()
            self._end_value()
        elif expects in ("value", "value or end"):
            return self._begin_value(character)
        elif expects in ("key", "key or end") and character == '"':
            self._expects, self._is_key = "string", True
        elif expects == "colon" and character == ":":
            self._expects = "value"
        elif expects == "more" and character == ",":
            self._expects = "key" if self._open[-1] == "{" else "value"
        else:
            return False
        return True

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            expects, rest = ("key or end" if character == "{" else "value or end"), ""
        elif character == '"':
            expects, rest, self._is_key = "string", "", False
        elif character in _WORDS:
            expects, rest = "word", _WORDS[character][1:]
        elif character in "-0123456789":
            expects, rest = "number", {"-": "minus", "0": "zero"}.get(character, "whole")
        else:
            return False
        self.in_first_value = self.in_first_value or len(self._open) > 0
        if character in "{[":
            self._open.append(character)
        self._expects, self._rest = expects, rest
        return True

    def _end_value(self) -> None:
        self._expects = "more"
        self.done = not self._open

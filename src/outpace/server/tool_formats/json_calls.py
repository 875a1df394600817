"""Calls written as JSON objects: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import ClassVar

from outpace.server.tool_formats.json_text import BLANKS, JsonScanner
from outpace.server.tool_formats.parser import Reading, ToolParser

__all__ = ["JsonCallParser"]

_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser(ToolParser):
    """A parser with `_json_call`, for the formats that write calls as JSON.

    `possible_members` are the only keys such an object may have, None for any. `known_only` lets it call only the
    request's tools, and only with arguments. Both are for a format in which an object is a call by its look alone.
    """

    possible_members: ClassVar[Collection[str] | None] = None
    known_only: ClassVar[bool] = False

    def _json_call(self) -> Reading[bool]:
        """Reads an object, blanks before it included, as a call. Returns whether it was announced.

        It stops behind the object, or before the character that cannot come: a call whose arguments are complete needs
        no more. Arguments may come before the name, as text that holds JSON, or not at all.
        """
        name: str | None = None
        arguments: str | None = None
        announced = False
        character = yield from self._blanks()
        if character != "{":
            self._unread([character])
            return False
        while True:
            key = yield from self._key()
            if key is None or (self.possible_members is not None and key not in self.possible_members):
                return announced
            if key in _ARGUMENTS and name is not None and arguments is None:
                arguments, announced = yield from self._streamed(name)
                value = arguments
            else:
                value = yield from self._value()
                if key in _ARGUMENTS:
                    arguments, value = (value, value) if arguments is None else (arguments, None)
                elif key == "name":
                    name = value = self._checked_name(value) if name is None else None
            if value is None:
                return announced
            character = yield from self._blanks()
            if character != ",":
                break
        if announced or character == "}":
            self._unread([character] if character != "}" else [])
            return announced or self._announce_whole(name, arguments)
        self._unread([character])
        return False

    def _key(self) -> Reading[str | None]:
        """Reads a key and the colon behind it; None if none comes."""
        if (character := (yield from self._blanks())) != '"':
            self._unread([character])
            return None
        text = yield from self._scanned('"')
        if text is None:
            return None
        if (character := (yield from self._blanks())) != ":":
            self._unread([character])
            return None
        key: str = json.loads(text)
        return key

    def _value(self) -> Reading[str | None]:
        """Reads any value; its text, or None where it breaks off."""
        first = yield from self._blanks()
        return (yield from self._scanned(first))

    def _scanned(self, first: str) -> Reading[str | None]:
        scanner = JsonScanner()
        character = first
        text = ""
        while (passed := scanner.feed(character)) is not None:
            text += passed
            if scanner.done:
                return text
            character = yield
        self._unread([character])
        return text if scanner.done else None

    def _streamed(self, name: str) -> Reading[tuple[str | None, bool]]:
        """Reads the arguments of a call that has its name, and gives an object out as it grows.

        Returns:
            (text of the value, None where it breaks off; whether the call was announced and the text given out)
        """
        character = yield from self._blanks()
        if character != "{":
            return (yield from self._scanned(character)), False
        scanner = JsonScanner()
        held, announced = "", False
        while (passed := scanner.feed(character)) is not None:
            if announced:
                self._arguments(passed)
            else:
                held += passed
                if scanner.in_first_value or scanner.done:
                    self._announce(name, held)
                    announced = True
            if scanner.done:
                self._complete()
                return held, True
            character = yield
        self._unread([character])
        return None, announced

    def _announce_whole(self, name: str | None, arguments: str | None) -> bool:
        """Announces a call that was read to its end, if it is one."""
        if arguments is None or arguments == "null":
            arguments = "" if self.known_only else "{}"
        text = _object_text(arguments)
        if name is None or text is None:
            return False
        self._announce(name, text)
        self._complete()
        return True

    def _checked_name(self, value: str | None) -> str | None:
        name = None if value is None or value[0] != '"' else json.loads(value)
        if not name or not _is_unicode(name) or (self.known_only and name not in self._tools):
            return None
        return str(name)


def _object_text(value: str) -> str | None:
    """The object of a value that is one, or that is text which holds one; else None."""
    if value.startswith("{"):
        return value
    if not value.startswith('"'):
        return None
    inner: str = json.loads(value).strip(BLANKS)
    scanner = JsonScanner()
    passed = [scanner.feed(character) for character in inner]
    whole = inner.startswith("{") and scanner.done and None not in passed and _is_unicode(inner)
    return "".join(text or "" for text in passed) if whole else None


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can write it: JSON can escape half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)

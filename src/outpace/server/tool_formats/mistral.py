"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; later [TOOL_CALLS]name{...} or name[ARGS]{...}."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from outpace.server.tool_formats.grammars import json_calls_grammar
from outpace.server.tool_formats.json_calls import JsonCallParser
from outpace.server.tool_formats.parser import Reading
from outpace.server.tool_requests import Tool

__all__ = ["MistralParser", "mistral_grammar", "mistral_id"]

_CHARACTERS = string.ascii_letters + string.digits
_BEHIND_NAMES = ("[ARGS]", "[CALL_ID]")


def mistral_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(_CHARACTERS) for _ in range(9))


class MistralParser(JsonCallParser):
    """A list of calls, or names followed by their arguments. A forced answer begins behind the marker.

    The marker is a token that is no text, which no grammar can prescribe.
    """

    markers = ("[TOOL_CALLS]",)

    def _read(self) -> Reading[None]:
        if self._forced:
            yield from self._calls_behind("")
        while True:
            blanks, marker = yield from self._until_marker()
            if not marker:
                return
            yield from self._calls_behind(blanks + marker)

    def _make_id(self) -> str:
        return mistral_id()

    def _calls_behind(self, lead: str) -> Reading[None]:
        begun = yield from self._attempt(lead, self._first_call())
        while begun and self._in_list and (yield from self._literal(",")):
            begun = yield from self._attempt(",", self._json_call())
        if begun and self._in_list:
            yield from self._literal("]")

    def _first_call(self) -> Reading[bool]:
        self._in_list = False
        character = yield from self._blanks()
        if character == "[":
            self._in_list = True
            return (yield from self._json_call())
        if character == "{":
            self._unread([character])
            return (yield from self._json_call())
        return (yield from self._named_call(character))

    def _named_call(self, first: str) -> Reading[bool]:
        name, character = "", first
        while character and (character in _CHARACTERS or character in "_-."):
            name += character
            character = yield
        self._unread([character])
        if not name:
            return False
        if (yield from self._literal(*_BEHIND_NAMES)) == "[CALL_ID]":  # its id is replaced by one that is surely new
            if (yield from self._until("[", without="{ \n")) is None:
                return False
            self._unread(["["])
            if not (yield from self._literal("[ARGS]")):
                return False
        arguments, announced = yield from self._streamed(name)
        return announced or (arguments is not None and self._announce_whole(name, arguments))


def mistral_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Lark: a list of calls of these tools, without the marker."""
    return json_calls_grammar(tools, several, arguments="arguments", first="[", last="]", between=", ")

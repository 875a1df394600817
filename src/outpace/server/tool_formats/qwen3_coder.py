"""Qwen3-Coder: <tool_call><function=name><parameter=x>value</parameter></function></tool_call>."""

from __future__ import annotations

import json

from outpace.server.tool_formats.json_calls import JsonCallParser
from outpace.server.tool_formats.parser import Reading
from outpace.server.tool_formats.value_types import is_bare_text, json_of, json_types, member_schema

__all__ = ["Qwen3CoderParser"]

_END = "</parameter>"


class Qwen3CoderParser(JsonCallParser):
    """Values are bare text, whose types the tool's schema says: without it they are read as JSON, else as text.

    One line break behind the opening tag and one before the closing tag are no part of a value. A value ends at the
    first `</parameter>`: the format has no way to write that inside one. The tags of the call itself may be missing.
    Under its grammar only plain strings are bare text, and everything else is JSON.
    """

    markers = ("<tool_call>", "<function=")

    def _read(self) -> Reading[None]:
        while True:
            blanks, marker = yield from self._until_marker()
            if not marker:
                return
            if (yield from self._attempt(blanks + marker, self._function(named=marker != "<tool_call>"))):
                yield from self._literal("</tool_call>")

    def _function(self, named: bool) -> Reading[bool]:
        if not named and not (yield from self._literal("<function=")):
            return False
        name = yield from self._until(">", without="<\n")
        if not name:
            return False
        keys: set[str] = set()
        while True:
            tag = yield from self._literal("<parameter=", "</function>")
            key = (yield from self._until(">", without="<\n")) if tag == "<parameter=" else None
            if not tag or (tag == "<parameter=" and (not key or key in keys)):
                return bool(keys)
            if not keys:
                self._announce(name, "{")
            if key is None:
                self._arguments("}")
                self._complete()
                return True
            self._arguments(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            if not (yield from self._parameter(name, key)):
                return True

    def _parameter(self, name: str, key: str) -> Reading[bool]:
        """Reads a value and its closing tag and gives it out; False if the answer ends before."""
        tool = self._tools.get(name)
        schema = member_schema(tool.parameters, key) if tool else {}
        types = json_types(schema)
        if self._forced and not is_bare_text(schema):
            value = yield from self._value()
            self._arguments(value or "")
            return value is not None and bool((yield from self._literal(_END)))
        if types == {"string"}:
            self._arguments('"')
            value = yield from self._text(streamed=True)
            self._arguments('"' if value is not None else "")
        else:
            value = yield from self._text(streamed=False)
            self._arguments(json_of(value, types) if value is not None else "")
        return value is not None

    def _text(self, streamed: bool) -> Reading[str | None]:
        """Reads a value and its closing tag, given out as it comes if streamed; None if the answer ends before."""
        passed: list[str] = []
        held = ""
        if (character := (yield)) != "\n":
            self._unread([character])
        while held not in (_END, "\n" + _END):
            if not (character := (yield)):
                self._unread([character])
                return None
            held += character
            while not _END.startswith(held) and not ("\n" + _END).startswith(held):
                if streamed:
                    self._arguments(json.dumps(held[0], ensure_ascii=False)[1:-1])
                passed.append(held[0])
                held = held[1:]
        return "".join(passed)

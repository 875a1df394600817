"""Llama 3.1 and 3.2: {"name": ..., "parameters": {...}}, after <|python_tag|> or as the whole answer, several with ;"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.server.tool_formats.grammars import json_calls_grammar
from outpace.server.tool_formats.json_calls import JsonCallParser
from outpace.server.tool_formats.parser import Reading
from outpace.server.tool_requests import Tool

__all__ = ["Llama3JsonParser", "llama3_json_grammar"]


class Llama3JsonParser(JsonCallParser):
    """JSON at the beginning of the answer or behind the tag.

    An answer may be JSON for other reasons: it is a call only if it names one of the tools and has parameters.
    """

    markers = ("<|python_tag|>",)
    possible_members = ("name", "parameters", "arguments", "type", "id")
    known_only = True

    def _read(self) -> Reading[None]:
        if (yield from self._attempt("", self._json_call())):
            yield from self._further_calls()
        while True:
            blanks, marker = yield from self._until_marker()
            if not marker:
                return
            if (yield from self._attempt(blanks + marker, self._json_call())):
                yield from self._further_calls()

    def _further_calls(self) -> Reading[None]:
        begun = True
        while begun:
            begun = yield from self._attempt((yield from self._literal(";")), self._json_call())


def llama3_json_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Lark: calls of these tools and nothing else."""
    return json_calls_grammar(tools, several, arguments="parameters", between="; ")

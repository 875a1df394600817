"""Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one or several."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.server.tool_formats.grammars import json_calls_grammar
from outpace.server.tool_formats.json_calls import JsonCallParser
from outpace.server.tool_formats.parser import Reading
from outpace.server.tool_requests import Tool

__all__ = ["HermesParser", "hermes_grammar"]


class HermesParser(JsonCallParser):
    """A JSON object between two tags; the closing one may be missing, and small models write a brace too many."""

    markers = ("<tool_call>",)

    def _read(self) -> Reading[None]:
        while True:
            blanks, marker = yield from self._until_marker()
            if not marker:
                return
            if (yield from self._attempt(blanks + marker, self._json_call())):
                yield from self._literal("</tool_call>", "}</tool_call>", "}\n</tool_call>")


def hermes_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Lark: calls of these tools and nothing else, as the templates of these models show them."""
    return json_calls_grammar(
        tools, several, arguments="arguments", before="<tool_call>\\n", after="\\n</tool_call>", between="\\n"
    )

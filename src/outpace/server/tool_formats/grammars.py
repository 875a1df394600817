"""Grammars that make a model write calls, in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from outpace.errors import InvalidParameter
from outpace.sampling.grammar_text import first_useful_line
from outpace.server.tool_requests import Tool

__all__ = ["COMBINING", "arguments_schema", "embedded_json", "json_calls_grammar"]

# As the chat templates write JSON, on one line: a text that can be written in one way only is drafted, not guessed.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
# schemas with one of these say more about an object than its own members do
COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if", "propertyNames", "unevaluatedProperties")


def json_calls_grammar(
    tools: Sequence[Tool],
    several: bool,
    *,
    arguments: str,
    between: str,
    before: str = "",
    after: str = "",
    first: str = "",
    last: str = "",
) -> str:
    """Lark: one call, or one or more, each a JSON object with a tool's name and arguments that its schema allows.

    Args:
        tools: what may be called; at least one.
        several: more than one call is possible.
        arguments: the member that holds the arguments.
        between: what stands between two calls; this and the others are escaped as in a Lark string.
        before: what stands before each call.
        after: what stands after each call.
        first: what stands before the first call.
        last: what stands after the last call.
    """
    more = f' ("{between}" call)*' if several else ""
    start = f"start: {_literal(first)}call{more}{_literal(last, behind=True)}"
    call = (
        f"call: {_literal(before)}({' | '.join(f'tool_{i}' for i in range(len(tools)))}){_literal(after, behind=True)}"
    )
    rules = [start, call]
    for index, tool in enumerate(tools):
        opening = json.dumps(f'{{"name": "{tool.name}", "{arguments}": ')
        rules.append(f'tool_{index}: {opening} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {embedded_json(arguments_schema(tool), tool)}")
    return "\n".join(rules)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object; members that it does not list are not made up."""
    schema = {**tool.parameters, "type": "object"}
    if not any(key in schema for key in COMBINING):
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", not schema["properties"] and bool(tool.parameters))
    return schema


def embedded_json(schema: Mapping[str, Any], tool: Tool) -> str:
    """A schema as it stands behind %json.

    Raises:
        InvalidParameter: no grammar can be made of it.
    """
    try:
        written = json.dumps({**schema, "x-guidance": _ONE_LINE}, allow_nan=False)
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(written))
    except (RecursionError, TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise InvalidParameter(
            f"the parameters of the tool {tool.name!r} cannot be prescribed: {first_useful_line(problem)}; change"
            " them, or use tool_choice 'auto'"
        )
    return written


def _literal(text: str, *, behind: bool = False) -> str:
    if not text:
        return ""
    return f' "{text}"' if behind else f'"{text}" '

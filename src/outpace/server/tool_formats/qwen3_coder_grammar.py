"""The grammar of Qwen3-Coder's calls: tags around bare text where a value is a plain string, around JSON elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.errors import InvalidParameter
from outpace.server.tool_formats.grammars import COMBINING, arguments_schema, embedded_json
from outpace.server.tool_formats.value_types import is_bare_text
from outpace.server.tool_requests import Tool

__all__ = ["qwen3_coder_grammar"]

_KEY = re.compile(r"[^<>\n\"\\]+")
_END = r'"\n</parameter>"'
# One terminal with its end: what ends a value cannot be part of one, so where it ends is never in doubt. Without the
# first part, bytes that are no UTF-8 would be possible: they too are no text that has the end in it.
_BARE = rf"BARE: (/(.|\n)*/ & ~/(.|\n)*<\/parameter>(.|\n)*/) {_END}"
_UNSUPPORTED = (*COMBINING, "minProperties", "maxProperties", "dependentRequired", "not")


def qwen3_coder_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Lark: calls of these tools and nothing else. Parameters come in the order of the schema, none unlisted.

    Raises:
        InvalidParameter: a schema says what this format cannot prescribe.
    """
    choice = " | ".join(f"tool_{index}" for index in range(len(tools)))
    more = r' ("\n" call)*' if several else ""
    rules = [f"start: call{more}", rf'call: "<tool_call>\n" ({choice}) "\n</tool_call>"', _BARE]
    for index, tool in enumerate(tools):
        rules += _tool_rules(f"tool_{index}", tool)
    return "\n".join(rules)


def _tool_rules(rule: str, tool: Tool) -> list[str]:
    schema = arguments_schema(tool)
    unsupported = [key for key in _UNSUPPORTED if key in schema]
    if unsupported:
        raise InvalidParameter(
            f"the parameters of the tool {tool.name!r} have {unsupported[0]}, which calls in the format qwen3_coder "
            "cannot be held to: use properties and required, or tool_choice 'auto'"
        )
    required = schema.get("required", [])
    listed = {**schema["properties"], **{key: True for key in required if key not in schema["properties"]}}
    rules, members = [], ""
    for number, (key, member) in enumerate(listed.items()):
        if not _KEY.fullmatch(key):
            raise InvalidParameter(f"the tool {tool.name!r} has a parameter {key!r}, which no tag can hold: rename it")
        if member is False and key not in required:
            continue
        members += f" {rule}_{number}{'' if key in required else '?'}"
        value = _value(f"{rule}_{number}", tool, {"allOf": [member]} if isinstance(member, bool) else member)
        rules.append(rf'{rule}_{number}: "<parameter={key}>\n" {value[0]} "\n"')
        rules += value[1:]
    return [rf'{rule}: "<function={tool.name}>\n"{members} "</function>"', *rules]


def _value(rule: str, tool: Tool, schema: Mapping[str, Any]) -> list[str]:
    """What stands for a value and its closing tag, and the rules it needs."""
    if not is_bare_text(schema):
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return [f"{rule}_json {_END}", f"{rule}_json: %json {embedded_json({**definitions, **schema}, tool)}"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        return ["BARE"]
    return ["(" + " | ".join(_quoted(f"{value}\n</parameter>") for value in values) + ")"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Tools, answers that call them, and ways to read an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Any

from outpace.server.tools import TOOL_FORMATS, Delta, ToolDelta, check_tools, collect, make_parser

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "note": {"type": ["string", "null"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = check_tools([WEATHER, CLOCK])


def read(name: str, pieces: Iterable[str], **options: Any) -> list[Delta]:
    """All deltas of an answer, with ids "0", "1", ..."""
    parser = make_parser(name, TOOLS, new_id=map(str, count()).__next__, **options)
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()


def outcome(name: str, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]) of an answer; the same in one piece, in three and in single characters."""
    third = len(text) // 3 + 1
    cuts = [[text], [text[:third], text[third : 2 * third], text[2 * third :]], list(text)]
    results = [collect(read(name, pieces, **options)) for pieces in cuts]
    assert results[0] == results[1] == results[2]
    content, calls = results[0]
    return content, [(call.name, call.arguments) for call in calls]


def call_text(name: str, calls: list[tuple[str, dict[str, Any]]], **dumps: Any) -> str:
    """Calls as a model writes them in a format."""

    def as_json(key: str) -> list[str]:
        return [json.dumps({"name": tool, key: arguments}, **dumps) for tool, arguments in calls]

    if name == "hermes":
        return "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in as_json("arguments"))
    if name == "mistral":
        return f"[TOOL_CALLS][{', '.join(as_json('arguments'))}]"
    if name == "llama3_json":
        return "; ".join(as_json("parameters"))
    assert name == "qwen3_coder" and name in TOOL_FORMATS
    blocks = []
    for tool, arguments in calls:
        values = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, **dumps)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        blocks.append(f"<tool_call>\n<function={tool}>\n{''.join(values)}</function>\n</tool_call>")
    return "\n".join(blocks)


def check_order(deltas: list[Delta]) -> None:
    """No delta is empty; the first of a call, and no other, has its id and name; calls come one after another."""
    begun = 0
    for delta in deltas:
        if not isinstance(delta, ToolDelta):
            assert delta.text
            continue
        if delta.id is None:
            assert delta.name is None and delta.arguments and delta.index == begun - 1
        else:
            assert delta.name and delta.index == begun
            begun += 1

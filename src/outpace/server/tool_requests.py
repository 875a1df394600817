"""The tools of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.checks import impossible, shown
from outpace.errors import InvalidParameter

__all__ = ["NAME", "NAME_IN_WORDS", "Tool", "check_choice", "check_tools"]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAME_IN_WORDS = "1 to 64 of the characters a-z, A-Z, 0-9, _ and -"


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call; `parameters` is the JSON schema of its arguments, {} for none."""

    name: str
    parameters: Mapping[str, Any]


def check_tools(tools: Any, label: str = "tools") -> tuple[Tool, ...]:
    """The tools of a request, as OpenAI writes them; None is none.

    Raises:
        InvalidParameter: naming the field, as `tools[1].function.name`.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise impossible(label, tools, "a list of tools")
    checked: list[Tool] = []
    places: dict[str, str] = {}
    for index, item in enumerate(tools):
        tool = _checked(f"{label}[{index}]", item)
        place = f"{label}[{index}].function.name"
        if tool.name in places:
            raise InvalidParameter(f"{place}={tool.name!r} is the name of {places[tool.name]} too: names must differ")
        places[tool.name] = place
        checked.append(tool)
    return tuple(checked)


def check_choice(choice: Any, tools: Sequence[Tool], label: str = "tool_choice") -> str | Tool:
    """What `tool_choice` asks for: "none", "auto", "required", or the tool that has to be called.

    None is "auto" if there are tools.

    Raises:
        InvalidParameter: it is none of these, or there is no such tool.
    """
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise impossible(f"{label}.type", choice.get("type"), "'function'")
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        named = next((tool for tool in tools if tool.name == name), None)
        if named is None:
            there_are = ", ".join(repr(tool.name) for tool in tools) or "no tools"
            raise InvalidParameter(
                f"{label}.function.name={shown(name)} is no tool of this request: it has {there_are}"
            )
        return named
    if not isinstance(choice, str) or choice not in ("none", "auto", "required"):
        valid = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"
        raise impossible(label, choice, valid)
    if choice == "required" and not tools:
        raise InvalidParameter(f"{label}='required' is not possible without tools: send tools, or leave it out")
    return choice if tools else "none"


def _checked(label: str, item: Any) -> Tool:
    if not isinstance(item, Mapping):
        raise impossible(label, item, "an object with type and function")
    if item.get("type") != "function":
        raise impossible(f"{label}.type", item.get("type"), "'function'")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise impossible(f"{label}.function", function, "an object with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise impossible(f"{label}.function.name", name, NAME_IN_WORDS)
    for key, kind, valid in (("description", str, "a text"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise impossible(f"{label}.function.{key}", function[key], valid)
    return Tool(name, _checked_schema(f"{label}.function.parameters", function.get("parameters")))


def _checked_schema(label: str, schema: Any) -> Mapping[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise impossible(label, schema, "a JSON schema of type object")
    if schema.get("type", "object") != "object":
        raise impossible(f"{label}.type", schema["type"], "'object': arguments have names")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise impossible(f"{label}.properties", properties, "an object of JSON schemas")
    for name, value in properties.items():
        if not isinstance(value, (Mapping, bool)):
            raise impossible(f"{label}.properties.{name}", value, "a JSON schema")
    required = schema.get("required", [])
    names = isinstance(required, Sequence) and not isinstance(required, str)
    if not names or not all(isinstance(item, str) for item in required):
        raise impossible(f"{label}.required", required, "a list of names of properties")
    return schema

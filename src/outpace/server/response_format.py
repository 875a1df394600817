"""`response_format` of a chat request, as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.checks import impossible
from outpace.errors import InvalidParameter
from outpace.server.tool_requests import NAME, NAME_IN_WORDS
from outpace.structured import StructuredOutputs

__all__ = ["response_structure"]

_TYPES = ("text", "json_object", "json_schema")


def response_structure(response_format: Any, label: str = "response_format") -> StructuredOutputs | None:
    """What the answer has to look like; None for any text.

    A schema is always followed to the letter, whether `strict` or not. It holds for the whole text that the model
    writes: of a model that reasons first, the reasoning too.

    Args:
        response_format: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": ...,
            "schema": {...}}}, or None.
        label: what the caller calls this field.

    Raises:
        InvalidParameter: naming the part that is not what it must be.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise impossible(label, response_format, "an object with a type")
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise impossible(f"{label}.type", kind, f"one of {', '.join(_TYPES)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    return _structure_of_schema(f"{label}.json_schema", response_format.get("json_schema"))


def _structure_of_schema(label: str, given: Any) -> StructuredOutputs:
    if not isinstance(given, Mapping):
        raise impossible(label, given, "an object with name and schema")
    name = given.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise impossible(f"{label}.name", name, NAME_IN_WORDS)
    for key, kind, valid in (("description", str, "a text"), ("strict", bool, "true or false")):
        if given.get(key) is not None and not isinstance(given[key], kind):
            raise impossible(f"{label}.{key}", given[key], valid)
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise impossible(f"{label}.schema", schema, "a JSON schema")
    try:
        return StructuredOutputs(json=schema)
    except InvalidParameter as error:
        raise InvalidParameter(f"{label}.schema is not possible: {error}") from error

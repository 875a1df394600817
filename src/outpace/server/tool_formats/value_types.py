"""JSON values written as bare text, by the types that a schema gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["is_bare_text", "json_of", "json_types", "member_schema"]

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}
_LIMITS_OF_TEXT = ("minLength", "maxLength", "pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "$ref")
_WORDS = {"True": "true", "False": "false", "None": "null"}


def member_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The schema of one member of an object; {} if the object's schema does not say."""
    member = schema.get("properties", {}).get(key)
    return member if isinstance(member, Mapping) else {}


def is_bare_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is a string of which the schema says nothing that would have to be prescribed as JSON."""
    return json_types(schema) == {"string"} and not any(key in schema for key in _LIMITS_OF_TEXT)


def json_types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a value may have; None if its schema does not say."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {item for item in named if isinstance(item, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_TYPES.get(type(value), "array") for value in values}
    for combined in ("anyOf", "oneOf"):
        parts = schema.get(combined)
        if isinstance(parts, list) and parts:
            found = [json_types(part) if isinstance(part, Mapping) else None for part in parts]
            return None if None in found else set().union(*(types or () for types in found))
    return None


def json_of(text: str, types: set[str] | None) -> str:
    """The JSON of a value: what the text says if the types allow it, else the text as a JSON string.

    Args:
        text: as the model wrote it; `True`, `False` and `None`, as Python writes them, count.
        types: what is possible; None for anything.
    """
    written = text.strip()
    written = _WORDS.get(written, written)
    if types is None or not {_type_of(written)}.isdisjoint(_with_integers(types)):
        return written if _type_of(written) else json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _with_integers(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def _type_of(text: str) -> str | None:
    """The type of a JSON text; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return _TYPES.get(type(value), "array")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"JSON has no {word}")

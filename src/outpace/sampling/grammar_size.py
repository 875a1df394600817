"""How much one request may ask a grammar to be.

llguidance compiles most grammars in milliseconds. A few kinds of them take it time that grows with the square of their
length or faster, in calls that cannot be stopped, so they are looked for before. Each limit is where compiling takes
about a second on a small machine; what ordinary requests need is far below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from outpace.structured import StructuredOutputs

__all__ = ["check_lark_size", "check_size"]

_MOST_SCHEMA = 65_536
_MOST_REGEX = 16_384
_MOST_GRAMMAR = 50_000
_MOST_CHOICES = 10_000
_MOST_CHOICE_TEXT = 100_000
_LONGEST_CHOICE = 10_000
_MOST_REPETITIONS = 400
_MOST_PATTERNS_OF_ALL = 12
_MOST_PROPERTIES = 1_000
_MOST_STEPS = 20_000

_REPETITION = re.compile(r"\\.|([?*+{])", re.DOTALL)
_DEFINITION = re.compile(r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?\s*(?:\[[^\]\n]*\]\s*)?:", re.MULTILINE)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/|//[^\n]*|#[^\n]*')
_TERMINAL = re.compile(r"\b_?[A-Z][A-Z0-9_]*\b")


def check_size(wanted: StructuredOutputs) -> None:
    """Looks at the size of what is asked for, before anything reads it.

    Raises:
        ValueError: the number, the limit, and what would work.
    """
    if wanted.json is not None:
        _check_schema(wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json))
    if wanted.regex is not None:
        _at_most(len(wanted.regex), _MOST_REGEX, "characters", "use a shorter expression, or choice for fixed texts")
        _check_repetitions(_repetitions(wanted.regex))
    if wanted.choice is not None:
        _at_most(len(wanted.choice), _MOST_CHOICES, "texts", "offer fewer")
        _at_most(max(map(len, wanted.choice)), _LONGEST_CHOICE, "characters in one text", "shorten it")
        _at_most(sum(map(len, wanted.choice)), _MOST_CHOICE_TEXT, "characters in all", "offer less")
    if wanted.grammar is not None:
        _at_most(len(wanted.grammar), _MOST_GRAMMAR, "characters", "use a shorter grammar")


def check_lark_size(lark: str) -> None:
    """Counts repetitions in the terminals of a Lark grammar: a terminal that names others holds all of theirs.

    Raises:
        ValueError: the number, the limit, and what would work.
    """
    bodies = _bodies(lark)
    sizes: dict[str, int] = {}

    def size(name: str, inside: tuple[str, ...]) -> int:
        if name in inside or len(inside) > len(bodies):  # llguidance refuses a terminal that contains itself
            return 0
        if name not in sizes:
            named = _TERMINAL.findall(_LITERAL.sub(" ", bodies[name]))
            parts = sum(size(part, (*inside, name)) for part in named if part in bodies)
            sizes[name] = _repetitions(bodies[name]) + parts
        return sizes[name]

    for name in bodies:
        if _TERMINAL.fullmatch(name):
            _check_repetitions(size(name, ()))
        else:  # a rule: each of its literals is an expression of its own
            _check_repetitions(max(map(_repetitions, _LITERAL.findall(bodies[name])), default=0))


def _bodies(lark: str) -> dict[str, str]:
    found = list(_DEFINITION.finditer(lark))
    ends = [match.start() for match in found[1:]] + [len(lark)]
    return {match.group(1): lark[match.end() : end] for match, end in zip(found, ends, strict=False)}


def _check_schema(schema: str) -> None:
    _at_most(len(schema), _MOST_SCHEMA, "characters", "use a smaller schema, without descriptions or in parts")
    parts = list(_objects(json.loads(schema)))
    _check_repetitions(sum(_repetitions(pattern) for part in parts for pattern in _patterns(part)))
    steps = sum(_steps(part.get("multipleOf")) for part in parts)
    _at_most(steps, _MOST_STEPS, "as multipleOf, without decimal point", "use a smaller or rounder number")
    for part in parts:
        merged = list(_objects(part["allOf"])) if "allOf" in part else []
        patterns = sum(len(_patterns(each)) for each in merged)
        _at_most(patterns, _MOST_PATTERNS_OF_ALL, "patterns below one allOf", "put them into fewer patterns")
        properties = sum(map(_count_properties, [part, *merged]))
        _at_most(properties, _MOST_PROPERTIES, "properties in one object", "split it into several objects")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _patterns(part: Mapping[str, Any]) -> list[str]:
    of_names = part.get("patternProperties")
    found = [part.get("pattern"), *(of_names if isinstance(of_names, dict) else ())]
    return [each for each in found if isinstance(each, str)]


def _count_properties(part: Mapping[str, Any]) -> int:
    properties = part.get("properties")
    return len(properties) if isinstance(properties, dict) else 0


def _steps(multiple: Any) -> int:
    """States of an automaton that knows the remainder of a division by this number."""
    if not isinstance(multiple, (int, float)) or isinstance(multiple, bool):
        return 0
    digits = Decimal(repr(multiple)).as_tuple().digits
    number = "".join(map(str, digits))
    return int(number[:18])


def _repetitions(expression: str) -> int:
    return sum(match.group(1) is not None for match in _REPETITION.finditer(expression))


def _check_repetitions(count: int) -> None:
    _at_most(count, _MOST_REPETITIONS, "repetitions (? * + {) in expressions", "repeat a group, as in (...){9}")


def _at_most(count: int, limit: int, what: str, instead: str) -> None:
    if count > limit:
        raise ValueError(f"it has {count} {what}, at most {limit} are possible: {instead}")

"""Checks of parameters: each takes what a caller wrote, whatever its kind of number or list, and gives back one form.

A parameter is a dataclass field made by `parameter`. It carries what it means, what is possible, and its check, so that
error texts, the command line's help and the docs say the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

from outpace.errors import InvalidParameter

__all__ = [
    "Check",
    "boolean",
    "check_field",
    "check_fields",
    "check_integer",
    "id_biases",
    "impossible",
    "integer",
    "num_arguments",
    "number",
    "one_of",
    "optional",
    "parameter",
    "processors",
    "shown",
    "text",
    "texts",
    "token_ids",
]

Check = Callable[[str, Any, str], Any]
"""(name, value, what is possible, in words) -> the value in its one form; raises InvalidParameter."""

_LONGEST_SHOWN = 120
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameter(
    default: Any, check: Check, *, meaning: str, valid: str, speculation: str = "", unset: str = "", hashed: bool = True
) -> Any:
    """A dataclass field with its check and what people have to know about it.

    Args:
        default: its value when left out.
        check: applied by `check_fields`.
        meaning: what it does.
        valid: what is possible, as it follows "it must be".
        speculation: how it behaves when tokens are drafted.
        unset: what None means, if that is its default.
        hashed: False for values that cannot be hashed; they still count when two are compared.
    """
    told = {"check": check, "meaning": meaning, "valid": valid, "speculation": speculation, "unset": unset}
    return field(default=default, hash=None if hashed else False, metadata=told)


def check_fields(instance: Any, prefix: str = "") -> None:
    """Replaces every field of a (frozen) dataclass by its checked form; errors have `prefix` before its name.

    Raises:
        InvalidParameter: naming the value and what would be possible.
    """
    for item in fields(instance):
        value = item.metadata["check"](prefix + item.name, getattr(instance, item.name), item.metadata["valid"])
        object.__setattr__(instance, item.name, value)


def check_field(owner: Any, name: str, value: Any, label: str) -> Any:
    """The checked form of one field's value; `label` is what the caller calls that field.

    Raises:
        InvalidParameter: naming the value and what would be possible.
    """
    told = next(item.metadata for item in fields(owner) if item.name == name)
    return told["check"](label, value, told["valid"])


def impossible(name: str, value: Any, valid: str) -> InvalidParameter:
    """The error that names a value and what would be possible."""
    return InvalidParameter(f"{name}={shown(value)} is not possible: it must be {valid}")


def shown(value: Any) -> str:
    """A value on one line, shortened if it is long."""
    try:
        line = " ".join(repr(value).split())
    except RecursionError:
        return "(a value too deep to show)"
    return line if len(line) <= _LONGEST_SHOWN else f"{line[: _LONGEST_SHOWN - 4]} ..."


def check_integer(name: str, value: int, *, low: int, high: float = math.inf, text: str) -> int:
    """The value as an int, whatever kind of integer it is.

    Raises:
        InvalidParameter: it is none, or out of range; `text` says what would be possible.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low or value > high:
        raise impossible(name, value, text)
    return int(value)


def integer(low: int, high: float = math.inf) -> Check:
    """An integer in [low, high]."""
    return lambda name, value, valid: check_integer(name, value, low=low, high=high, text=valid)


def number(low: float, high: float = math.inf, *, above: float = -math.inf) -> Check:
    """A finite number in [low, high] and more than `above`, as a float."""

    def check(name: str, value: Any, valid: str) -> float:
        converted = _as_float(value)
        if not math.isfinite(converted) or not low <= converted <= high or converted <= above:
            raise impossible(name, value, valid)
        return converted

    return check


def boolean(name: str, value: Any, valid: str) -> bool:
    """True or False; no number stands for them."""
    if not isinstance(value, bool):
        raise impossible(name, value, valid)
    return value


def one_of(possible: Collection[str]) -> Check:
    """One of these words."""

    def check(name: str, value: Any, valid: str) -> str:
        if not isinstance(value, str) or value not in possible:
            raise impossible(name, value, valid)
        return value

    return check


def optional(check: Check) -> Check:
    """None stays None."""
    return lambda name, value, valid: None if value is None else check(name, value, valid)


def text(name: str, value: Any, valid: str) -> str:
    """At least one character, all of which UTF-8 can write (half a surrogate pair is no character)."""
    if not isinstance(value, str) or not value or not _is_unicode(value):
        raise impossible(name, value, valid)
    return value


def texts(*, alone: bool = False, at_least: int = 0, distinct: bool = False) -> Check:
    """Texts as a tuple; None is none of them.

    Args:
        alone: a text stands for a list of it alone.
        at_least: how many there have to be.
        distinct: no text may come twice.
    """

    def check(name: str, value: Any, valid: str) -> tuple[str, ...]:
        items = [value] if alone and isinstance(value, str) else _items(name, value, valid)
        if len(items) < at_least:
            raise impossible(name, value, valid)
        for item in items:
            if not isinstance(item, str) or not item or not _is_unicode(item):
                raise _impossible_item(name, item, valid)
        if distinct and (repeated := _first_repeated(items)) is not None:
            raise InvalidParameter(f"{name} has {shown(repeated)} twice: it must be {valid}")
        return tuple(items)

    return check


def token_ids(*, at_least: int = 0) -> Check:
    """Token ids, 0 or more each, as a tuple; None is none of them. Whether the model has them is seen elsewhere."""

    def check(name: str, value: Any, valid: str) -> tuple[int, ...]:
        items = _items(name, value, valid)
        if len(items) < at_least:
            raise impossible(name, value, valid)
        return tuple(_token_id(name, item, valid) for item in items)

    return check


def id_biases(limit: float) -> Check:
    """{token id: number in [-limit, limit]}; ids may be written as text, as JSON has to."""

    def check(name: str, value: Any, valid: str) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise impossible(name, value, valid)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            # isdecimal alone would take digits of other scripts, int() also "+4", " 4" and "4_2".
            written = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
            converted = _as_float(bias)
            if not isinstance(written, Integral) or isinstance(written, bool) or written < 0:
                raise _impossible_item(name, key, valid)
            if not -limit <= converted <= limit:
                raise _impossible_item(name, {key: bias}, valid)
            if int(written) in biases:
                raise InvalidParameter(f"{name} has token id {written} twice: it must be {valid}")
            biases[int(written)] = converted
        return biases

    return check


def processors(name: str, value: Any, valid: str) -> tuple[Callable[..., Any], ...]:
    """Callables of two or three positional arguments, as a tuple; None is none of them."""
    items = _items(name, value, valid)
    for item in items:
        if not callable(item) or num_arguments(item) is None:
            raise _impossible_item(name, item, valid)
    return tuple(items)


def _items(name: str, value: Any, valid: str) -> list[Any]:
    """The items of any collection that is no text and no mapping; arrays count."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Collection):
        raise impossible(name, value, valid)
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        raise impossible(name, value, valid) from None


def _impossible_item(name: str, item: Any, valid: str) -> InvalidParameter:
    return InvalidParameter(f"{name} with {shown(item)} is not possible: it must be {valid}")


def _token_id(name: str, item: Any, valid: str) -> int:
    if not isinstance(item, Integral) or isinstance(item, bool) or item < 0:
        raise _impossible_item(name, item, valid)
    return int(item)


def _as_float(value: Any) -> float:
    """The number as a float; NaN for what is none, inf for what is out of reach."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _first_repeated(items: list[str]) -> str | None:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def num_arguments(function: Callable[..., Any]) -> int | None:
    """How a logits processor is called: with three arguments by position if it asks for three, else with two.

    None if that cannot be. Some functions written in C do not say what they take: they get two, and a call that fails
    says so. Parameters with a default are left alone.
    """
    try:
        signature = inspect.signature(function)
    except Exception:  # of the caller's code too
        return 2
    positional = [item for item in signature.parameters.values() if item.kind in _BY_POSITION]
    count = 3 if sum(item.default is item.empty for item in positional) == 3 else 2
    try:
        signature.bind(*range(count))
    except TypeError:
        return None
    return count

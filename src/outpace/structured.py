"""What the text of an answer has to look like: a JSON schema, an expression, a choice, or a grammar.

Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

from outpace.checks import boolean, check_fields, impossible, optional, parameter, shown, text, texts
from outpace.errors import InvalidParameter
from outpace.refused import STRUCTURED_REFUSED, Refusal, RefusesByName, known_arguments

__all__ = ["StructuredOutputs"]


def _schema(name: str, value: Any, valid: str) -> str | dict[str, Any]:
    """Text stays as it is, so that its order and numbers are the caller's; a mapping is copied, so that it stays."""
    if isinstance(value, str):
        if not isinstance(_loaded(name, value, valid), (dict, bool)):
            raise impossible(name, value, valid)
        return value
    if not isinstance(value, Mapping):
        raise impossible(name, value, valid)
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name}={shown(value)} cannot be written as JSON ({error})") from None
    return copied


def _loaded(name: str, value: str, valid: str) -> Any:
    text(name, value, valid)
    try:
        return json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name}={shown(value)} is not JSON ({error}): it must be {valid}") from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"JSON has no {word}")


@dataclass(frozen=True, slots=True)
class StructuredOutputs(metaclass=RefusesByName):
    """Exactly one of these says what the text has to look like (vLLM's names and meanings).

    Args:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression that the whole text matches.
        choice: strings of which the text is one.
        grammar: a context-free grammar in Lark's notation, or in llama.cpp's GBNF.
        json_object: True: any JSON object.

    Raises:
        InvalidParameter: none or several are given, or one has the wrong type.
    """

    _refused: ClassVar[Mapping[str, Refusal]] = STRUCTURED_REFUSED

    json: str | Mapping[str, Any] | None = parameter(
        None,
        optional(_schema),
        meaning="a JSON schema",
        valid="a JSON schema of at most 65,536 characters: a mapping, or the text of a JSON object, true or false",
        unset="off",
        hashed=False,
    )
    regex: str | None = parameter(
        None,
        optional(text),
        meaning="a regular expression that the whole text matches",
        valid="a regular expression of at least one character (at most 16,384, with at most 400 of ? * + {)",
        unset="off",
    )
    choice: Sequence[str] | None = parameter(
        None,
        optional(texts(at_least=1, distinct=True)),
        meaning="texts of which the answer is one",
        valid="a list of one or more different texts, none of them empty (at most 10,000 texts and 100,000 characters, "
        "10,000 in one)",
        unset="off",
    )
    grammar: str | None = parameter(
        None,
        optional(text),
        meaning="a context-free grammar in Lark's notation or llama.cpp's GBNF",
        valid="the text of a grammar, at most 50,000 characters",
        unset="off",
    )
    json_object: bool | None = parameter(
        None, optional(boolean), meaning="any JSON object", valid="True or False", unset="off"
    )

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs.")
        given = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameter(
                f"structured_outputs with {' and '.join(given) or 'nothing'} is not possible: give exactly one of "
                f"{', '.join(item.name for item in fields(self))}"
            )

    @classmethod
    def parse(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """Reads a mapping with the names of the fields, None standing for "left out".

        Raises:
            InvalidParameter: an unknown name, one that outpace refuses, or a value that is not possible.
        """
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            valid = f"a StructuredOutputs, or a mapping with one of {', '.join(item.name for item in fields(cls))}"
            raise impossible("structured_outputs", value, valid)
        return cls(**known_arguments(cls, value))

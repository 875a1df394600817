"""What the text of an answer has to look like: a JSON schema, an expression, a choice, or a grammar.

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outpace.errors import InvalidParameter

__all__ = ["StructuredOutputs"]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
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

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameter(
                f"structured_outputs with {' and '.join(given) or 'nothing'} is not possible: give exactly one of "
                f"{', '.join(item.name for item in fields(self))}"
            )

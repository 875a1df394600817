"""A vocabulary without texts: callers of `generate` give ids and get ids."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.errors import InvalidParameter
from outpace.protocols import Detokenizer, Grammar
from outpace.structured import StructuredOutputs

__all__ = ["BareIds"]


class BareIds:
    """Implements `outpace.protocols.Vocabulary` for ids that are never shown as text.

    Every row of the model's head counts, padded ones too, as it does in transformers.

    Args:
        size: ids from here on do not exist.
    """

    missing_ids: Sequence[int] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        raise InvalidParameter("an accelerated model works on token ids: encode text with its tokenizer")

    def token_text(self, token_id: int) -> str:
        return ""

    def detokenizer(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool, after: Sequence[int] = ()
    ) -> Detokenizer:
        return _Silent()

    def grammar(self, structured_outputs: StructuredOutputs) -> Grammar:
        raise InvalidParameter("structured_outputs are not possible with an accelerated model: use outpace.LLM")


class _Silent:
    """A request's text, which nobody reads."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

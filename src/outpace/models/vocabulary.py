"""What the engine has to know about a model's tokens, told by its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from outpace.errors import InvalidParameter
from outpace.models.tokenizer import Tokenizer
from outpace.protocols import Detokenizer, Grammar
from outpace.structured import StructuredOutputs

__all__ = ["ModelVocabulary"]


class ModelVocabulary:
    """A model's tokens (`outpace.protocols.Vocabulary`).

    Args:
        tokenizer: the model's.
        size: V, width of the logits.
        compile_grammar: gives a fresh grammar at its beginning, as `GrammarCompiler.compile` does.
    """

    def __init__(
        self, tokenizer: Tokenizer, size: int, compile_grammar: Callable[[StructuredOutputs], Grammar]
    ) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._compile_grammar = compile_grammar

    @property
    def size(self) -> int:
        """Ids from here on do not exist."""
        return self._size

    @cached_property
    def missing_ids(self) -> Sequence[int]:
        """Ids below `size` that no token has, ascending."""
        known = set(self._tokenizer.vocab.values())
        return tuple(index for index in range(self._size) if index not in known)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, with nothing added in front or behind.

        Special tokens written out in the text become those tokens, as in a prompt.

        Raises:
            InvalidParameter: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"{text!r} is not valid Unicode: half a surrogate pair at character {error.start}"
            ) from error
        return self._tokenizer.encode_piece(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special tokens shown; part of a character shows as U+FFFD, an unknown id as ""."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def detokenizer(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool, after: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh one for one request, whose text follows the tokens `after` (the end of its prompt)."""
        return self._tokenizer.detokenizer(skip_special_tokens, spaces_between_special_tokens, after)

    def grammar(self, structured_outputs: StructuredOutputs) -> Grammar:
        """A fresh grammar at its beginning.

        Raises:
            InvalidParameter: the schema, expression or grammar is not possible; says what is wrong with it.
        """
        return self._compile_grammar(structured_outputs)

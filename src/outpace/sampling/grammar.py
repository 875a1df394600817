"""Follows an output through the grammar it has to obey.

llguidance knows the grammars: it says which tokens continue a text. Three things are settled here.

* **End of text.** EOS is kept from llguidance: every id that ends a text is allowed exactly where the text may end,
  and no other special token anywhere.
* **Errors.** llguidance never raises; it goes into an error state and stays there. Every call that may end so is
  followed by a look. What failed is asked again of a matcher that shares nothing and has consumed the same tokens, and
  only its failure counts (`grammar_beginning.py`).
* **The same state, the same answer.** A mask depends on the tokens consumed and not rolled back, on nothing else. Where
  only one text can follow, llguidance allows the one token with which the tokenizer would write it; `consume` is held
  to the same rule, so that what a mask forbids is never consumed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from outpace.errors import OutpaceError
from outpace.protocols import Grammar
from outpace.sampling.grammar_beginning import Beginning
from outpace.sampling.grammar_text import explained, first_useful_line, grammar_text, impossible
from outpace.sampling.grammar_tokenizer import GrammarTokenizer
from outpace.structured import StructuredOutputs

__all__ = ["GrammarCompiler", "TokenGrammar"]

_KEPT_GRAMMARS = 32
_DEAD_END = "NoExtensionBias"
_PROBED = 4
_NO_BEGINNING = "no token of this model can begin such a text"

_Answer = TypeVar("_Answer")


class GrammarCompiler:
    """Makes grammars for one model's tokens. Safe to use from several threads.

    JSON is written with at most one space, or one new line and its indentation, between two parts, and ends with its
    last brace: `{"a": 1}`, `{"a":1}` and indented texts are possible, endless blanks are not. (`%json` inside a Lark
    grammar follows llguidance's own defaults.)

    Args:
        tokenizer_json: the tokenizer, as text of a `tokenizer.json`; read at the first use.
        vocab_size: V, width of the masks.
        eos_ids: ids that end a text.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._source = (tokenizer_json, vocab_size, frozenset(eos_ids))
        self._tokenizer: GrammarTokenizer | None = None
        self._beginnings: OrderedDict[tuple[str, bool], Beginning] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """A fresh grammar at its beginning.

        Raises:
            InvalidParameter: it is damaged or contradicts itself, uses what is not supported, is too large, or no
                token of the vocabulary can begin a text of it.
        """
        key = grammar_text(wanted), wanted.grammar is not None
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = GrammarTokenizer(*self._source)
            beginning = self._beginnings.pop(key, None) or _checked(self._tokenizer, *key, wanted)
            self._beginnings[key] = beginning
            if len(self._beginnings) > _KEPT_GRAMMARS:
                self._beginnings.popitem(last=False)
            return TokenGrammar(beginning)


def _checked(tokenizer: GrammarTokenizer, text: str, free: bool, wanted: StructuredOutputs) -> Beginning:
    """A beginning that can be used.

    Its first masks are computed, which is where most grammars that are too large show it: alternatives are open at the
    beginning or behind a few fixed tokens, properties of a JSON object behind its first brace.
    """
    beginning = Beginning(tokenizer, text, free=free)
    problem = next(map(first_useful_line, beginning.problems()), None)
    if problem is None:
        grammar = TokenGrammar(beginning)
        try:
            problem = None if grammar.mask().any() else _NO_BEGINNING
            for token in grammar.forced(_PROBED) or tokenizer.backend.tokenize_str("{"):
                if grammar.consume(token):
                    grammar.mask()
        except OutpaceError as error:
            problem = str(error)
    if problem is not None:
        raise impossible(wanted, problem)
    return beginning


class TokenGrammar:
    """One request's way through a grammar (`outpace.protocols.Grammar`).

    Args:
        beginning: of the grammar.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._tokenizer = beginning.tokenizer
        self._matcher = beginning.copy()
        self._text_tokens: list[int] = []
        self._eos_tokens = 0
        self._failed_at: tuple[int, OutpaceError] | None = None

    @property
    def ended(self) -> bool:
        """Whether the text is complete and no token but EOS may follow, or EOS has come."""
        return self._eos_tokens > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> NDArray[np.bool_]:
        """[V] which tokens may come next; none at a dead end: a text that no token of the vocabulary continues.

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        if self.ended:
            return self._tokenizer.is_eos.copy()
        if self._failed_at is not None:
            raise self._failed_at[1]  # no text gets behind a place without a mask
        try:
            mask = self._tokenizer.text_mask(self._ask(LLMatcher.compute_bitmask))
        except OutpaceError as error:
            self._failed_at = len(self._text_tokens), error
            raise
        if self._matcher.is_error():
            self._begin_again()
            return np.zeros_like(mask)
        return mask | self._tokenizer.is_eos if self._matcher.is_accepting() else mask

    def consume(self, token_id: int) -> bool:
        """Goes one token on. False, and no change, if it may not come next.

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return False
        if self._tokenizer.is_eos[token_id]:
            may_end = self.ended or self._matcher.is_accepting()
            self._eos_tokens += may_end
            return may_end
        if self.ended or not self._tokenizer.is_text[token_id] or not self._continues(token_id):
            return False
        self._ask(lambda matcher: matcher.consume_token(token_id))
        self._text_tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        """Goes `count` consumed tokens back, EOS included.

        Raises:
            ValueError: not so many were consumed.
        """
        if not 0 <= count <= len(self._text_tokens) + self._eos_tokens:
            raise ValueError(
                f"cannot go {count} tokens back: {len(self._text_tokens) + self._eos_tokens} were consumed"
            )
        from_eos = min(count, self._eos_tokens)
        from_text = count - from_eos
        self._eos_tokens -= from_eos
        if from_text:
            del self._text_tokens[-from_text:]
            if self._failed_at is not None and len(self._text_tokens) < self._failed_at[0]:
                self._failed_at = None
            if not self._matcher.rollback(from_text):
                self._begin_again()

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, in order. Does not move.

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        count = 0
        try:
            while count < len(token_ids) and self.consume(token_ids[count]):
                count += 1
        finally:
            self.rollback(count)
        return count

    def forced(self, most: int) -> list[int]:
        """The first `most` tokens of the text that has to come next, as the tokenizer would split it. Does not move.

        The end of that text is left out where one token could hold it and what follows: a guess at it would be wrong
        nearly always (SmolLM2 writing JSON: 43 times in 44). Tokens that are no text end it too.

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        if self.ended or most < 1:
            return []
        tokens = self._ask(LLMatcher.compute_ff_tokens)[:most]
        return list(takewhile(self._tokenizer.is_text.item, tokens))

    def _continues(self, token_id: int) -> bool:
        """Whether the text goes on with this token, and with no other if it can go on in one way only."""
        if self._ask(lambda matcher: matcher.validate_tokens([token_id])) != 1:
            return False
        return self._ask(LLMatcher.compute_ff_tokens)[:1] in ([], [token_id])

    def _ask(self, question: Callable[[LLMatcher], _Answer]) -> _Answer:
        """What llguidance says behind the consumed tokens. A failure counts if a matcher that shares nothing agrees."""
        answer = question(self._matcher)
        if self._has_failed():
            self._matcher = self._beginning.alone()
            self._matcher.consume_tokens(self._text_tokens)
            answer = question(self._matcher)
            if self._has_failed():
                problem = first_useful_line(self._matcher.get_error())
                self._begin_again()
                raise OutpaceError(
                    f"the grammar cannot be followed behind {len(self._text_tokens)} tokens: {explained(problem)}"
                )
        return answer

    def _has_failed(self) -> bool:
        return self._matcher.is_error() and self._matcher.stop_reason() != _DEAD_END

    def _begin_again(self) -> None:
        self._matcher = self._beginning.copy()
        self._matcher.consume_tokens(self._text_tokens)

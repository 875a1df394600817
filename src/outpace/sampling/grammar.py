"""Follows an output through the grammar it has to obey.

llguidance knows the grammars: it says which tokens continue a text. Three things are settled here.

* **End of text.** EOS is kept from llguidance: every id that ends a text is allowed exactly where the text may end,
  and no other special token anywhere.
* **Errors.** llguidance never raises; it goes into an error state and stays there. Every call that may end so is
  followed by a look, and a matcher in that state is replaced by a fresh one that has consumed the same tokens.
* **The same state, the same answer.** A mask depends on the tokens consumed and not rolled back, on nothing else. Where
  only one text can follow, llguidance allows the one token with which the tokenizer would write it; `consume` is held
  to the same rule, so that what a mask forbids is never consumed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from outpace.errors import OutpaceError
from outpace.protocols import Grammar
from outpace.sampling.grammar_text import first_useful_line, grammar_text, impossible
from outpace.sampling.grammar_tokenizer import GrammarTokenizer
from outpace.structured import StructuredOutputs

__all__ = ["GrammarCompiler", "TokenGrammar"]

_KEPT_GRAMMARS = 64
_DEAD_END = "NoExtensionBias"
_NO_BEGINNING = "no token of this model can begin such a text"


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
        self._beginnings: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """A fresh grammar at its beginning.

        Raises:
            InvalidParameter: it is damaged or contradicts itself, uses what is not supported, or no token of the
                vocabulary can begin a text of it.
        """
        text = grammar_text(wanted)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = GrammarTokenizer(*self._source)
            beginning = self._beginnings.pop(text, None) or _first_matcher(self._tokenizer, text, wanted)
            self._beginnings[text] = beginning
            if len(self._beginnings) > _KEPT_GRAMMARS:
                self._beginnings.popitem(last=False)
            return TokenGrammar(beginning, self._tokenizer)


def _first_matcher(tokenizer: GrammarTokenizer, text: str, wanted: StructuredOutputs) -> LLMatcher:
    matcher = LLMatcher(tokenizer.backend, text, log_level=0)
    problem = first_useful_line(matcher.get_error()) if matcher.is_error() else None
    if problem is None and (warnings := matcher.get_grammar_warnings()):
        problem = first_useful_line(warnings[0])
    if problem is None:
        try:
            problem = None if TokenGrammar(matcher, tokenizer).mask().any() else _NO_BEGINNING
        except OutpaceError as error:
            problem = str(error)
    if problem is not None:
        raise impossible(wanted, problem)
    return matcher


class TokenGrammar:
    """One request's way through a grammar (`outpace.protocols.Grammar`).

    Args:
        beginning: stands at the beginning of the grammar; is copied, and does not move.
        tokenizer: whose tokens.
    """

    def __init__(self, beginning: LLMatcher, tokenizer: GrammarTokenizer) -> None:
        self._beginning = beginning
        self._tokenizer = tokenizer
        self._matcher = beginning.deep_copy()
        self._text_tokens: list[int] = []
        self._eos_tokens = 0

    @property
    def ended(self) -> bool:
        """Whether the text is complete and no token but EOS may follow, or EOS has come."""
        return self._eos_tokens > 0 or self._matcher.is_stopped()

    def mask(self) -> NDArray[np.bool_]:
        """[V] which tokens may come next; none at a dead end: a text that no token of the vocabulary continues.

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        if self.ended:
            return self._tokenizer.is_eos.copy()
        mask = self._tokenizer.text_mask(self._matcher.compute_bitmask())
        if self._matcher.stop_reason() == _DEAD_END:
            self._begin_again()
            return np.zeros_like(mask)
        self._check()
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
        self._matcher.consume_token(token_id)
        self._check()
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
            self._matcher.rollback(from_text)
            self._check()

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

    def forced(self) -> list[int]:
        """Tokens of the text that has to come next, as the tokenizer would split it; may be empty. Does not move.

        The end of that text is left out where one token could hold it and what follows: a guess at it would be wrong
        nearly always (SmolLM2 writing JSON: 43 times in 44).

        Raises:
            OutpaceError: the text became too complex for llguidance.
        """
        if self.ended:
            return []
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens[: self.count_legal(tokens)]

    def _continues(self, token_id: int) -> bool:
        """Whether the text goes on with this token, and with no other if it can go on in one way only."""
        fits = self._matcher.validate_tokens([token_id]) == 1
        self._check()
        if not fits:
            return False
        only = self._matcher.compute_ff_tokens()[:1]
        self._check()
        return only in ([], [token_id])

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        problem = first_useful_line(self._matcher.get_error())
        self._begin_again()
        raise OutpaceError(f"the grammar cannot be followed behind {len(self._text_tokens)} tokens: {problem}")

    def _begin_again(self) -> None:
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._text_tokens)

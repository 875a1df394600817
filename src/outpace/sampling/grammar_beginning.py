"""A compiled grammar that requests start from, and the limits of what llguidance may spend on it.

Copies of a matcher share one lexer, which grows by what each of them looks at. That saves work, but work is limited,
and what a limit says then depends on who came before; a lexer that has met one fails for everybody afterwards. So:

* The limits are far above what ordinary requests meet.
* Where a copy fails, a matcher of its own, with several times the limits, goes the same way alone. Only what it says
  counts: that depends on the grammar and the tokens, on nothing else.
* The shared one is dropped then; the next request compiles it again.
"""

from __future__ import annotations

import threading

from llguidance import LLMatcher, LLParserLimits

from outpace.sampling.grammar_tokenizer import GrammarTokenizer

__all__ = ["Beginning", "parser_limits"]

# A step's fuel is about 14,000 a millisecond, a lexer's state 1 to 2 kB.
_STEP_FUEL = 10_000_000
_STEP_ITEMS = 200_000
_LEXER_STATES = 100_000
_ALONE = 4
# Building expressions: enough for 10,000 choices. Terminals of a free grammar are composed of each other, so that a few
# lines may stand for a huge one.
_FUEL = 200_000
_FUEL_OF_FREE_GRAMMARS = 30_000
# Parts of a grammar that are open at one place: four for an optional property of a JSON object. Where a free grammar is
# ambiguous they grow with the text, and a step costs their square (where it is right-recursive they only grow).
_OPEN_PARTS = 10_000
_OPEN_PARTS_OF_FREE_GRAMMARS = 700


def parser_limits(*, free: bool, times: int = 1) -> LLParserLimits:
    """What llguidance may spend on a grammar, `free` or not; `times` as much on a step."""
    return LLParserLimits(
        initial_lexer_fuel=_FUEL_OF_FREE_GRAMMARS if free else _FUEL,
        max_items_in_row=_OPEN_PARTS_OF_FREE_GRAMMARS if free else _OPEN_PARTS,
        step_lexer_fuel=_STEP_FUEL * times,
        step_max_items=_STEP_ITEMS * times,
        max_lexer_states=_LEXER_STATES * times,
        precompute_large_lexemes=False,  # would cost more than all the rest of compiling
        verbose_errors=False,
    )


class Beginning:
    """Makes matchers that stand at the beginning of a grammar. Safe to use from several threads.

    Args:
        tokenizer: whose tokens.
        grammar: in llguidance's notation.
        free: a grammar that was written by hand, with rules and terminals of its own.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str, *, free: bool) -> None:
        self.tokenizer = tokenizer
        self._grammar = grammar
        self._free = free
        self._lock = threading.Lock()
        self._shared: LLMatcher | None = None

    def copy(self) -> LLMatcher:
        """A matcher that shares what it learns; in its error state if the grammar is none."""
        with self._lock:
            if self._shared is None:
                self._shared = self._compile(1)
            return self._shared.deep_copy()

    def alone(self) -> LLMatcher:
        """A matcher that shares nothing, after a copy has failed; what the copies shared is dropped."""
        with self._lock:
            self._shared = None
        return self._compile(_ALONE)

    def problems(self) -> list[str]:
        """Why it is no grammar, or what llguidance warns of; empty if all is well."""
        matcher = self.copy()
        return [matcher.get_error()] if matcher.is_error() else list(matcher.get_grammar_warnings())

    def _compile(self, times: int) -> LLMatcher:
        limits = parser_limits(free=self._free, times=times)
        return LLMatcher(self.tokenizer.backend, self._grammar, log_level=0, limits=limits)

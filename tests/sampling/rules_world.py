"""A vocabulary of twelve tokens and a grammar of choices, small enough to see through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.rules import LogitsRules, compile_rules
from outpace.structured import StructuredOutputs

TOKENS = ("a", "b", "c", " a", " b", "ab", " ", "<eos>", "<end>", None, "\n", None)
EOS, END = 7, 8
STOPS = frozenset({EOS, END})
MISSING = (9, 11)
SIZE = len(TOKENS)


class ChoiceGrammar:
    """The text is one of some strings. Counts how often it moves."""

    def __init__(self, choices: Sequence[str], tokens: Sequence[str | None]) -> None:
        self._choices = choices
        self._tokens = tokens
        self.consumed: list[int] = []
        self.moves = 0

    def _text(self) -> str:
        return "".join(self._tokens[token] or "" for token in self.consumed)

    @property
    def ended(self) -> bool:
        if EOS in self.consumed:
            return True
        text = self._text()
        return text in self._choices and not any(c != text and c.startswith(text) for c in self._choices)

    def mask(self) -> NDArray[np.bool_]:
        return np.array([self._legal(token) for token in range(len(self._tokens))])

    def _legal(self, token: int) -> bool:
        if EOS in self.consumed or not 0 <= token < len(self._tokens):
            return False
        text, more = self._text(), self._tokens[token]
        if token == EOS:
            return text in self._choices
        return more is not None and any(choice.startswith(text + more) for choice in self._choices)

    def consume(self, token_id: int) -> bool:
        self.moves += 1
        if not self._legal(token_id):
            return False
        self.consumed.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.consumed), (count, self.consumed)
        self.moves += 1
        del self.consumed[len(self.consumed) - count :]

    def count_legal(self, token_ids: Sequence[int]) -> int:
        raise AssertionError("a rule has to look for the end of the grammar itself")

    def forced(self, most: int) -> list[int]:
        text = self._text()
        rests = {choice[len(text) :] for choice in self._choices if choice.startswith(text)}
        return encode(rests.pop(), self._tokens)[:most] if len(rests) == 1 else []


def encode(text: str, tokens: Sequence[str | None] = TOKENS) -> list[int]:
    """Longest token first; characters that no token has are lost."""
    ids = []
    while text:
        fitting = [(len(t), i) for i, t in enumerate(tokens) if t and "<" not in t and text.startswith(t)]
        length, token = max(fitting, default=(1, -1))
        ids += [token] if fitting else []
        text = text[length:]
    return ids


@dataclass
class SmallVocabulary:
    """Fulfils `outpace.protocols.Vocabulary` as far as rules look at it."""

    tokens: tuple[str | None, ...] = TOKENS
    missing_ids: tuple[int, ...] = MISSING
    grammars: list[ChoiceGrammar] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        return encode(text, self.tokens)

    def grammar(self, structured_outputs: StructuredOutputs) -> ChoiceGrammar:
        self.grammars.append(ChoiceGrammar(structured_outputs.choice or (), self.tokens))
        return self.grammars[-1]


WHOLE = SmallVocabulary(tokens=(*"abcdef", "<x>", "<eos>"), missing_ids=())
"""No id is missing, so that rules come from parameters alone."""


def rules_of(
    params: SamplingParams,
    vocabulary: SmallVocabulary | None = None,
    prompt: Sequence[int] = (0, 1),
    output: Sequence[int] = (),
    stops: frozenset[int] = STOPS,
) -> LogitsRules:
    """Compiled rules, which must exist, with some output committed."""
    rules = compile_rules(params, vocabulary or SmallVocabulary(), stops, prompt)
    assert rules is not None
    for token in output:
        rules.commit(token)
    return rules


def zeros(size: int = SIZE) -> NDArray[np.float32]:
    return np.zeros(size, np.float32)


def left(values: NDArray[np.float32]) -> list[int]:
    """Ids that may be chosen."""
    return np.flatnonzero(values > -np.inf).tolist()


def outcome(rules: LogitsRules, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32] | None:
    """The row, or None if no token is left."""
    try:
        return rules(logits, path)
    except OutpaceError as error:
        assert "no token is left" in str(error), error
        return None

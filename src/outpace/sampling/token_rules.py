"""Rules about single token ids that do not look at the text: bans, bias, and stop tokens that come too early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from outpace.errors import InvalidParameter
from outpace.sampling.stage import NEVER, Floats, History

__all__ = ["LogitBias", "MinTokens", "TokenBans", "check_ids"]

_SHOWN = 8
"""Ids of a long list that a message quotes."""


def check_ids(name: str, ids: Iterable[int], size: int) -> list[int]:
    """The ids as a list.

    Raises:
        InvalidParameter: one of them is outside [0, size).
    """
    checked = list(ids)
    for token in checked:
        if not 0 <= token < size:
            raise InvalidParameter(f"{name}: {token} is not possible: this model's token ids are 0 to {size - 1}")
    return checked


class TokenBans:
    """Tokens that can never come: ids without a token, ids that are not allowed, bad words of one token.

    Raises:
        InvalidParameter: the lists leave no token.
    """

    def __init__(
        self, size: int, missing: Sequence[int], allowed: Sequence[int] | None, single_bad_words: Sequence[int]
    ) -> None:
        self._legal = np.ones(size, np.bool_)
        if allowed is not None:
            self._legal[:] = False
            self._legal[list(allowed)] = True
        self._legal[list(missing)] = False
        self._legal[list(single_bad_words)] = False
        self._kept = None if allowed is None else np.flatnonzero(self._legal)
        self._banned = np.flatnonzero(~self._legal)
        names = {
            "allowed_token_ids": allowed is not None,
            "bad_words": bool(single_bad_words),
            "ids that the tokenizer has no token for": bool(missing),
        }
        self.name = " and ".join(name for name, used in names.items() if used)
        if not self._legal.any():
            raise InvalidParameter(f"{_described(allowed)} is not possible: {self.name} together leave no token")

    @property
    def bans_any(self) -> bool:
        return self._banned.size > 0

    def allows(self, token_id: int) -> bool:
        """Whether this id can ever come; ids outside the vocabulary cannot."""
        return 0 <= token_id < self._legal.size and bool(self._legal[token_id])

    def leave_more_than(self, ids: Sequence[int]) -> bool:
        """Whether a token outside `ids` can come."""
        others = self._legal.copy()
        others[list(ids)] = False
        return bool(others.any())

    def apply(self, values: Floats, history: History) -> None:
        if self._kept is None:
            values[self._banned] = NEVER
            return
        kept = values[self._kept]  # few, as a rule: cheaper than writing to all others by index
        values.fill(NEVER)
        values[self._kept] = kept


def _described(allowed: Sequence[int] | None) -> str:
    if allowed is None:
        return "bad_words"
    shown = ", ".join(map(str, islice(allowed, _SHOWN)))
    return f"allowed_token_ids=[{shown}{', ...' if len(allowed) > _SHOWN else ''}]"


class LogitBias:
    """Adds a number to the logits of some tokens."""

    name = "logit_bias"

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids: NDArray[np.intp] = np.array(list(biases), np.intp)
        self._biases = np.array(list(biases.values()), np.float32)

    def apply(self, values: Floats, history: History) -> None:
        values[self._ids] += self._biases


class MinTokens:
    """Holds back tokens that end the text while there are fewer than `count` output tokens."""

    name = "min_tokens"

    def __init__(self, count: int, stop_ids: Sequence[int]) -> None:
        self._count = count
        self._stop_ids: NDArray[np.intp] = np.array(sorted(stop_ids), np.intp)
        self._stop_set = frozenset(stop_ids)

    def allows(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether this id may come after so many output tokens."""
        return num_output_tokens >= self._count or token_id not in self._stop_set

    def apply(self, values: Floats, history: History) -> None:
        if history.num_output_tokens < self._count:
            values[self._stop_ids] = NEVER

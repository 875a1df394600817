"""A small automaton as a grammar: stretches where one token may follow, where some may, and where the text may end."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ToyGrammar"]

_STATES = 9
_COMPLETE = _STATES
_OVER = _STATES + 1


@functools.cache
def _moves(name: str, state: int, size: int, eos_ids: frozenset[int]) -> dict[int, int]:
    """Tokens that may come in a state, and the state behind each."""
    if state == _OVER:
        return {}
    ends = dict.fromkeys(sorted(eos_ids), _OVER)
    if state == _COMPLETE:
        return ends
    source = random.Random(f"{name}:{state}")
    ordinary = [token for token in range(size) if token not in eos_ids]
    count = (1, 6, size // 2)[state % 3]
    others = [other for other in range(_STATES) if other != state]
    moves = {token: source.choice(others) for token in source.sample(ordinary, count)}
    if state % 3 == 2:
        moves[next(iter(moves))] = _COMPLETE
        moves |= ends
    return moves


class ToyGrammar:
    """An automaton drawn from a name (`outpace.protocols.Grammar`); it checks that it is used as the protocol says.

    Args:
        name: other names, other automata.
        size: of the vocabulary.
        eos_ids: allowed exactly where the text may end.
    """

    def __init__(self, name: str, size: int, eos_ids: frozenset[int]) -> None:
        self._name = name
        self._size = size
        self._eos_ids = eos_ids
        self._states = [0]

    @property
    def ended(self) -> bool:
        return self._states[-1] in (_COMPLETE, _OVER)

    def mask(self) -> NDArray[np.bool_]:
        legal = np.zeros(self._size, np.bool_)
        legal[list(self._options())] = True
        return legal

    def consume(self, token_id: int) -> bool:
        following = self._options().get(token_id)
        if following is None:
            return False
        self._states.append(following)
        return True

    def rollback(self, count: int) -> None:
        assert 0 <= count < len(self._states), f"{count} tokens back of {len(self._states) - 1}"
        del self._states[len(self._states) - count :]

    def count_legal(self, token_ids: Sequence[int]) -> int:
        state = self._states[-1]
        for index, token in enumerate(token_ids):
            moves = self._options(state)
            if token not in moves:
                return index
            state = moves[token]
        return len(token_ids)

    def forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        state = self._states[-1]
        while len(moves := self._options(state)) == 1 and state < _COMPLETE and len(tokens) < most:
            ((token, state),) = moves.items()
            tokens.append(token)
        return tokens

    def _options(self, state: int | None = None) -> dict[int, int]:
        return _moves(self._name, self._states[-1] if state is None else state, self._size, self._eos_ids)

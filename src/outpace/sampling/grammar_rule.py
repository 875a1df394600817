"""A grammar as a rule for rows: it follows the text to the row that is asked about and comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.errors import OutpaceError
from outpace.protocols import Grammar
from outpace.sampling.stage import NEVER, Floats, History

__all__ = ["GrammarRule"]


class GrammarRule:
    """Bans what a grammar does not allow after the committed text and a path of draft tokens.

    The grammar stands behind the committed text and `_ahead`; it moves by what two paths do not share, so that the rows
    of a chain cost one token each.

    Args:
        grammar: at its beginning, and used by nobody else.
    """

    name = "structured_outputs"

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._ahead: list[int] = []

    def fits(self, path: Sequence[int]) -> bool:
        """Whether these tokens may come next, in order."""
        return self._move_to(path)

    def apply(self, values: Floats, history: History) -> None:
        """Bans tokens in the row. One that cannot be reached, or is behind the end, stays as it is: nobody uses it."""
        if not self._move_to(history.path):
            return
        legal = self._grammar.mask()
        if self._grammar.ended and not legal.any():
            return
        np.copyto(values, NEVER, where=~legal)

    def commit(self, token_id: int) -> bool:
        """The text goes on by one token. True if it is complete.

        Raises:
            OutpaceError: the grammar does not allow the token here.
        """
        if not self._move_to((token_id,)):
            raise OutpaceError(f"token {token_id} was chosen where structured_outputs does not allow it")
        self._ahead.clear()
        return self._grammar.ended

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, in order; the one that ends the text is the last.

        Where the grammar fails, the draft ends: if the text gets there, its row will say so.
        """
        try:
            self._move_to(())
            for index, token in enumerate(token_ids):
                if not self._grammar.consume(token):
                    return index
                self._ahead.append(token)
                if self._grammar.ended:
                    return index + 1
        except OutpaceError:
            return len(self._ahead)
        return len(token_ids)

    def forced(self, most: int) -> list[int]:
        """The first `most` tokens that have to come next; none where the grammar fails, as the row will say."""
        try:
            self._move_to(())
            return self._grammar.forced(most)
        except OutpaceError:
            return []

    def _move_to(self, path: Sequence[int]) -> bool:
        """Goes behind `path`, or as far as it is allowed and then False."""
        shared = 0
        for ours, theirs in zip(self._ahead, path, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared < len(self._ahead):
            back = len(self._ahead) - shared
            del self._ahead[shared:]  # first: a grammar that fails on the way has gone back all the same
            self._grammar.rollback(back)
        for token in path[shared:]:
            if not self._grammar.consume(token):
                return False
            self._ahead.append(token)
        return True

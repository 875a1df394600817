"""Which draft tokens a draft model has rows of, and which of these rows stay when the text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["FedRows"]


@dataclass(slots=True)
class FedRows:
    """Rows of draft tokens behind the committed ones, in the order in which they were computed.

    Args:
        tokens: of the rows.
        parents: the row before each on its path, -1 for the last committed token.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> int:
        """One more row; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def path(self, row: int) -> list[int]:
        """The rows from the first on its path to this one."""
        found = [row]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def along(self, tokens: Sequence[int]) -> list[int]:
        """The rows of these tokens, which follow the committed ones, as far as there are any."""
        found: list[int] = []
        at = -1
        for token in tokens:
            edges = zip(self.parents, self.tokens, strict=True)
            row = next((row for row, edge in enumerate(edges) if edge == (at, token)), None)
            if row is None:
                break
            found.append(row)
            at = row
        return found

    def clear(self) -> None:
        """All rows are gone."""
        self.tokens.clear()
        self.parents.clear()

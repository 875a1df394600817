"""What a head on the target's states knows of a text: rows in its cache, and states that wait to become rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from outpace.drafters.own_rows import OwnRows

__all__ = ["HeadRows"]

_MOST_WAITING = 2048
"""Positions whose states wait, of one request; of the ones before them the head then knows nothing."""


@dataclass(slots=True)
class HeadRows(OwnRows):
    """Of one request. Some positions may be missing, where the target's rows were computed for somebody else.

    Args:
        tokens: the committed text, as far as it was told.
        positions: [num_rows] of the rows, ascending.
        waiting: positions behind them whose states wait, ascending.
        states: their states, [n, Ht * layers] in pieces, in order.
        root: [1, H] what the last committed row put out.
        outputs: [1, H] what each row of a draft token put out.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    root: torch.Tensor | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position behind the last committed row."""
        return self.positions[-1] + 1 if self.positions else 0

    @property
    def known_end(self) -> int:
        """Position behind the last whose state has come."""
        return self.waiting[-1] + 1 if self.waiting else self.end

    @property
    def waiting_bytes(self) -> int:
        """Memory of the states that wait."""
        return sum(piece.nbytes for piece in self.states)

    def book(self, count: int) -> list[int]:
        """See `OwnRows.book`; the states are to be taken with `take`."""
        booked, self.waiting = self.waiting[:count], self.waiting[count:]
        self.positions += booked
        self.num_rows += count
        return booked

    def add(self, first: int, states: torch.Tensor) -> None:
        """States of the positions from `first` on, behind the last that is known."""
        self.waiting += range(first, first + len(states))
        self.states.append(states)
        too_many = len(self.waiting) - _MOST_WAITING
        if too_many > 0:
            self.waiting = self.waiting[too_many:]
        while too_many > 0:  # piece by piece, since a request that nobody drafts for comes here with every token
            oldest = self.states.pop(0)
            if len(oldest) > too_many:
                self.states.insert(0, oldest[too_many:])
            too_many -= len(oldest)

    def drop_waiting(self, most: int) -> None:
        """Forgets all but the first `most` of the states that wait."""
        if len(self.waiting) > most:
            self.waiting = self.waiting[:most]
            self.states = [torch.cat(self.states)[:most].clone()]

    def take(self, count: int) -> torch.Tensor:
        """[count, Ht * layers] the first of the states that wait."""
        states = torch.cat(self.states)
        self.states = [states[count:]] if count < len(states) else []
        return states[:count]

    def usable(self, common: int, known: int) -> tuple[int, int]:
        """Rows and waiting states of this text that hold for another.

        A row for position i is made of token i + 1 and of states up to i.

        Args:
            common: tokens that both begin with.
            known: positions of the other text of which no states will come, at most `common`.
        """
        return bisect_left(self.positions, min(known, common - 1)), bisect_left(self.waiting, known)

    def inherit(self, other: HeadRows, num_rows: int, num_states: int) -> None:
        """Takes over the first rows of another, copied in the cache by now, and the first states that wait there."""
        self.num_rows, self.positions = num_rows, other.positions[:num_rows]
        self.waiting = other.waiting[:num_states]
        self.states = [torch.cat(other.states)[:num_states].clone()] if num_states else []

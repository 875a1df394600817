"""The chance that a drafter's second, third, ... candidate is the target's token, given that those before it are not.

Chen et al. "Sequoia" 2402.12374. What the drafter says of a candidate, as a share of what it leaves to all but those
before it, is corrected by the odds that came over the odds that it said, by rank and by how sure it was of the first.
Nothing has to be verified for this: the target's token behind the text is known in every step, and so is its rank among
the candidates that were drafted, whether their rows were computed or not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from outpace.control.odds import odds_ratio, times_odds

__all__ = ["RankAcceptance"]

_GUESSES = (0.3, 0.2, 0.15)
"""Chance of the second, the third, and any later candidate before one was seen."""

_FIRST_EDGES = (0.3, 0.6)
"""Confidences of the first candidate between two of these are alike."""

_GUESS_WEIGHT = 3.0
_WEIGHT = 2.0
_KEEP = math.exp(-1.0 / 40.0)
"""Of what was seen, with every step that drafts, whether drafts could branch or not: where branches do not seem to pay
few can, and what was learnt long ago must not outweigh what these teach."""


class _Count:
    """Candidates of a rank: how many were expected to be right, were right, and were there."""

    __slots__ = ("expected", "kept", "seen")

    def __init__(self) -> None:
        self.expected = self.kept = self.seen = 0.0

    def add(self, expected: float, kept: bool) -> None:
        self.expected += expected
        self.kept += kept
        self.seen += 1.0

    def fade(self) -> None:
        self.expected *= _KEEP
        self.kept *= _KEEP
        self.seen *= _KEEP

    def factor(self, start: float) -> float:
        return odds_ratio(self.expected, self.kept, self.seen, _WEIGHT, start)


class RankAcceptance:
    """What is known of the candidates of one drafter behind its first."""

    def __init__(self) -> None:
        self._all = [_Count() for _ in _GUESSES]
        self._by_first = [[_Count() for _ in range(len(_FIRST_EDGES) + 1)] for _ in _GUESSES]
        self._factors: dict[tuple[int, int], float] = {}

    def average(self, rank: int) -> float:
        """Of a candidate of which nothing is said; rank 1 is the second one."""
        place = _place(rank)
        count = self._all[place]
        return (count.kept + _GUESS_WEIGHT * _GUESSES[place]) / (count.seen + _GUESS_WEIGHT)

    def chance(self, rank: int, first: float, share: float) -> float:
        """Of a candidate with this share of what those before it leave, the first being as likely as `first`."""
        key = (_place(rank), bisect_right(_FIRST_EDGES, first))
        factor = self._factors.get(key)
        if factor is None:
            place, sure = key
            start = 1.0
            for count in self._all[: place + 1]:  # each rank is supposed to be what the one before it is
                start = count.factor(start)
            factor = self._factors[key] = self._by_first[place][sure].factor(start)
        return times_odds(share, factor)

    def fade(self) -> None:
        """A step with drafts of this drafter has come."""
        for count in (*self._all, *(each for rank in self._by_first for each in rank)):
            count.fade()
        self._factors.clear()

    def observe(self, said: Sequence[float] | None, count: int, right: int | None) -> None:
        """The target's token among the candidates of one place is known.

        Args:
            said: the drafter's confidences in them, the first one's first; None if it has none.
            count: candidates.
            right: which one it is, from 0; None for none of them.
        """
        left = 1.0 - said[0] if said is not None else 1.0
        for rank in range(1, count if right is None else min(count, right + 1)):
            place, kept = _place(rank), rank == right
            if said is None:
                self._all[place].add(self.average(rank), kept)
                continue
            share = share_of(said[rank], left)
            self._all[place].add(share, kept)
            self._by_first[place][bisect_right(_FIRST_EDGES, said[0])].add(share, kept)
            left -= said[rank]
        self._factors.clear()


def share_of(confidence: float, left: float) -> float:
    """Of what is left to the candidates that come next: never quite nothing, never quite all."""
    return min(0.99, max(0.01, confidence / left if left > 0.0 else 1.0))


def _place(rank: int) -> int:
    return min(rank, len(_GUESSES)) - 1

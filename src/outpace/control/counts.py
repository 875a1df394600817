"""Many counts of tokens kept and seen that fade together, at no price for those that are left alone."""

from __future__ import annotations

import math

__all__ = ["FadingCounts"]

_LARGEST = 1e12


class FadingCounts:
    """Instead of old counts becoming less, new ones become more: what counts is only how they compare.

    Args:
        size: how many there are.
        memory: drafts after which a count has faded to a third.

    Attributes:
        kept: tokens, in units of `one`.
        seen: tokens, in units of `one`.
        one: what a token counts that comes now.
    """

    __slots__ = ("_growth", "kept", "one", "seen")

    def __init__(self, size: int, memory: float) -> None:
        self.kept = [0.0] * size
        self.seen = [0.0] * size
        self.one = 1.0
        self._growth = math.exp(1.0 / memory)

    def fade(self, num_drafts: int) -> None:
        """So many drafts have come."""
        self.one *= self._growth**num_drafts
        if self.one > _LARGEST:
            self.kept = [value / self.one for value in self.kept]
            self.seen = [value / self.one for value in self.seen]
            self.one = 1.0

    def add(self, index: int, kept: float, seen: float) -> None:
        """Tokens that came now."""
        self.kept[index] += kept * self.one
        self.seen[index] += seen * self.one

    def now(self, index: int) -> tuple[float, float]:
        """(kept, seen), in tokens."""
        return self.kept[index] / self.one, self.seen[index] / self.one

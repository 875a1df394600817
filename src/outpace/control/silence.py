"""How often a drafter that is asked has nothing to say: a grammar cuts its draft, or its first token ends the text.

Such an ask costs its call and brings no token, so less is promised of the next one. It says nothing of the tokens of
the drafts that do come, whose chances stay as they are.
"""

from __future__ import annotations

__all__ = ["Silence"]

_KEEP = 1.0 - 1.0 / 32.0
_WEIGHT = 2.0  # asks that count as made in advance


class Silence:
    """Asks of one drafter, or of one for one request; old ones fade.

    Args:
        found: asks that found something before anybody counted.
    """

    __slots__ = ("asked", "silent")

    def __init__(self, found: int = 0) -> None:
        self.asked = min(float(found), 1.0 / (1.0 - _KEEP))
        self.silent = 0.0

    def add(self, found: bool) -> None:
        """It was asked, and found something or not."""
        self.asked = _KEEP * self.asked + 1.0
        self.silent = _KEEP * self.silent + (not found)

    def share(self, guess: float = 0.0) -> float:
        """Of the asks that find nothing, 0 to 1, `guess` being what is expected before the first one."""
        return (self.silent + _WEIGHT * guess) / (self.asked + _WEIGHT)

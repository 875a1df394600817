"""Chances corrected by a factor on their odds."""

from __future__ import annotations

import math

__all__ = ["LEAST", "MOST", "odds_ratio", "times_odds"]

LEAST, MOST = 0.005, 0.995
"""No chance is less, none is more."""


def odds_ratio(expected: float, kept: float, seen: float, weight: float, start: float = 1.0) -> float:
    """Odds that came over odds that were expected, both with `weight` tokens of each kind more; `start` without any."""
    lean = math.sqrt(start)
    rejected, unexpected = seen - kept, seen - expected
    return (kept + weight * lean) * (unexpected + weight) / ((rejected + weight / lean) * (expected + weight))


def times_odds(chance: float, factor: float) -> float:
    scaled = chance * factor
    corrected = scaled / (scaled + 1.0 - chance)
    return LEAST if corrected < LEAST else MOST if corrected > MOST else corrected

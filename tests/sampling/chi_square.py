"""The chi-square test, in plain Python: how likely counts this far from their law, or farther, would be."""

from __future__ import annotations

import math
from collections.abc import Sequence

ALPHA = 1e-6
"""A law test fails below this. Seeds are fixed, so a failure is a change, never bad luck."""


def chi_square_p(counts: Sequence[float], law: Sequence[float]) -> float:
    """The p-value of counts under a law of probabilities; cells expecting fewer than five are pooled.

    A count where the law has probability zero gives 0.
    """
    total = sum(counts)
    if any(count and not chance for count, chance in zip(counts, law, strict=True)):
        return 0.0
    cells = sorted(((chance * total, count) for count, chance in zip(counts, law, strict=True) if chance), reverse=True)
    pooled: list[list[float]] = []
    for expected, count in cells:
        if pooled and (pooled[-1][0] < 5 or expected < 5):
            pooled[-1][0] += expected
            pooled[-1][1] += count
        else:
            pooled.append([expected, count])
    statistic = math.fsum((count - expected) ** 2 / expected for expected, count in pooled)
    return chi_square_tail(statistic, len(pooled) - 1) if len(pooled) > 1 else 1.0


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees >= statistic): the regularised upper incomplete gamma function."""
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return 1 - scale * total
    return scale / _continued_fraction(a, x)


def _continued_fraction(a: float, x: float) -> float:
    """x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / (x + 5 - a - ...)), from the inside out."""
    depth = 200 + int(20 * math.sqrt(x))
    value = x + 2 * depth + 1 - a
    for n in range(depth, 0, -1):
        value = x + 2 * n - 1 - a - n * (n - a) / value
    return value

"""The yardstick of the law tests, against published quantiles."""

from __future__ import annotations

import math

import pytest

from .chi_square import chi_square_p, chi_square_tail


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (2.0, 2, math.exp(-1)), (23.209251, 10, 0.01), (3.940299, 10, 0.95)],
)
def test_tail_agrees_with_published_quantiles(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-6)


def test_far_tail_has_its_closed_form() -> None:
    # Four degrees of freedom: exp(-x / 2) (1 + x / 2).
    assert chi_square_tail(60.0, 4) == pytest.approx(math.exp(-30) * 31, rel=1e-12)


def test_counts_are_compared_with_their_law() -> None:
    # (60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4 with one degree of freedom.
    assert chi_square_p([60, 40], [0.5, 0.5]) == pytest.approx(0.04550026, rel=1e-6)
    assert chi_square_p([50, 50, 0], [0.5, 0.5, 0.0]) == 1.0
    assert chi_square_p([50, 50, 1], [0.5, 0.5, 0.0]) == 0.0

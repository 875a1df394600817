"""When a head is called better: gains that are large enough, and that the windows agree about."""

from __future__ import annotations

import math

import pytest

from outpace.train.acceptance import Acceptance
from outpace.train.comparing import Judged, compare


def judged(*scores: float) -> Judged:
    mean = sum(scores) / len(scores)
    return Judged(Acceptance(5, 100, (), (), mean / 2, mean / 2, 0.5), scores)


@pytest.mark.parametrize(
    ("old", "new", "better"),
    [
        ((4.0, 5.0, 3.0, 4.0), (4.2, 5.2, 3.2, 4.21), True),  # windows differ, but agree about the gain
        ((4.0, 5.0, 3.0, 4.0), (4.9, 4.6, 3.4, 4.1), False),  # more on average, by one window
        ((4.0, 5.0, 3.0, 4.0), (4.01, 5.01, 3.01, 4.01), False),  # sure, and too little
        ((4.0, 5.0, 3.0, 4.0), (4.0, 5.0, 3.0, 4.0), False),
        ((4.0, 5.0, 3.0, 4.0), (3.0, 4.0, 2.0, 3.0), False),
        ((4.0, 5.0, 3.0), (8.0, 9.0, 7.0), False),  # too few windows to know
    ],
)
def test_better(old: tuple[float, ...], new: tuple[float, ...], better: bool) -> None:
    assert compare(judged(*old), judged(*new)).is_better is better


def test_numbers() -> None:
    """Differences 0, 1, 1, 2: mean 1, standard deviation sqrt(2/3), of which four windows leave half."""
    found = compare(judged(2, 3, 4, 5), judged(2, 4, 5, 7))
    assert (found.gain, found.windows) == (1.0, 4)
    assert found.doubt == pytest.approx(math.sqrt(2 / 3) / 2)
    assert "the same 4 held-out windows (together +1.000 +- 0.408)" in found.describe()
    assert "2.250 at temperature 0 and 2.250 at 1; the head it began as had 1.750 and 1.750" in found.describe()
    assert "3 held-out windows (too few to tell)" in compare(judged(2, 3, 4), judged(3, 4, 5)).describe()

"""Steps are timed in turn, by a clock, and no longer than allowed."""

from __future__ import annotations

import pytest

from outpace.doctor.timing import median_seconds


class Steps:
    """A step of n rows takes n seconds, the one whose number is `slow` a hundred more."""

    def __init__(self, slow: int | None = None) -> None:
        self.now, self.calls, self._slow = 0.0, list[int](), slow

    def __call__(self, rows: int) -> None:
        self.now += rows + 100 * (len(self.calls) == self._slow)
        self.calls.append(rows)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("slow", range(12))
def test_one_busy_moment_does_not_count(slow: int) -> None:
    steps = Steps(slow)
    assert median_seconds(steps, (1, 2, 5), budget=0, clock=steps.clock) == {1: 1.0, 2: 2.0, 5: 5.0}
    assert steps.calls == [1, 2, 5] * 2 + [5, 2, 1] + [1, 2, 5]  # a round to warm up, then three


def test_rounds_end_with_the_budget_or_their_number() -> None:
    steps, told = Steps(), list[tuple[int, int]]()
    median_seconds(steps, (1, 2), budget=10, clock=steps.clock, round_done=lambda *counts: told.append(counts))
    assert len(steps.calls) == 2 * (1 + 4)  # a round is 3 seconds: the fifth would begin at 12
    assert told == [(1, 9), (2, 9), (3, 9), (4, 9), (9, 9)]
    steps = Steps()
    median_seconds(steps, (1, 2), budget=1e9, most=6, clock=steps.clock)
    assert len(steps.calls) == 2 * (1 + 6)

"""Times a step at several numbers of rows, alternating, so that a busy moment meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

__all__ = ["RoundDone", "median_seconds"]

RoundDone = Callable[[int, int], None]
"""Takes (rounds done, rounds at most)."""


def median_seconds(
    step: Callable[[int], object],
    rows: Sequence[int],
    *,
    budget: float,
    least: int = 3,
    most: int = 9,
    round_done: RoundDone = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """{rows: median seconds of `step(rows)`}: all numbers of rows once a round, upwards and downwards in turn.

    Args:
        step: what is timed; called once with each number beforehand, as first calls are slower.
        rows: its arguments.
        budget: no round begins later than so many seconds after the first, but for the `least` ones.
        least: rounds at least.
        most: rounds at most.
        round_done: called after each round.
        clock: time in seconds.
    """
    times: dict[int, list[float]] = {count: [] for count in rows}
    for count in rows:
        step(count)
    began = clock()
    for number in range(most):
        if number >= least and clock() - began > budget:
            break
        for count in rows if number % 2 == 0 else reversed(rows):
            start = clock()
            step(count)
            times[count].append(clock() - start)
        round_done(number + 1, most)
    round_done(most, most)
    return {count: median(taken) for count, taken in times.items()}

"""Times several things in turn, so that a busy moment meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

__all__ = ["RoundDone", "median_seconds"]

Key = TypeVar("Key")
RoundDone = Callable[[int, int], None]
"""Takes (rounds done, rounds at most)."""


def median_seconds(
    run: Callable[[Key], object],
    keys: Sequence[Key],
    *,
    budget: float,
    least: int = 3,
    most: int = 9,
    round_done: RoundDone = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, float]:
    """{key: median seconds of `run(key)`}: every key once a round, forwards and backwards in turn.

    Args:
        run: what is timed; called once with each key beforehand, as first calls are slower.
        keys: its arguments, as numbers of rows.
        budget: no round begins later than so many seconds after the first, but for the `least` ones.
        least: rounds at least.
        most: rounds at most.
        round_done: called after each round.
        clock: time in seconds.
    """
    times: dict[Key, list[float]] = {key: [] for key in keys}
    for key in keys:
        run(key)
    began = clock()
    for number in range(most):
        if number >= least and clock() - began > budget:
            break
        for key in keys if number % 2 == 0 else reversed(keys):
            start = clock()
            run(key)
            times[key].append(clock() - start)
        round_done(number + 1, most)
    round_done(most, most)
    return {key: median(taken) for key, taken in times.items()}

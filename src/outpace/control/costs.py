"""What steps of the target and calls of computing drafters cost, in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outpace.control.row_costs import NATIVE_SHAPE, NOISE, RowCosts
from outpace.decisions import DraftCall

__all__ = ["DraftCosts", "TargetCosts"]

UNKNOWN_RELATIVE = 0.25
"""Of a drafter that nobody has timed or weighed: its pass over the target's, a guess that lets it be tried."""

_PROMPT_NOISE = 0.3  # prompt rows need no logits and attend differently: they say less about rows that are verified
_OTHER_THREADS_DOUBT = 0.5
_WIDE, _WIDE_STEP = 1.15, 0.15  # first guess, and how far one call moves it
_FEW_SHARE = 0.1  # parts of a call below this share of it are not timed by it


class TargetCosts:
    """Seconds of a step by rows, for every number of threads that was in use.

    Args:
        shape: see `RowCosts`.
    """

    def __init__(self, shape: Sequence[tuple[float, float]] = NATIVE_SHAPE) -> None:
        self._shape = tuple(shape)
        self.tables: dict[int, RowCosts] = {}
        self.now = RowCosts(self._shape)
        self._threads: int | None = None

    def observe(self, threads: int, rows: int, prompt_rows: int, seconds: float) -> None:
        """A step took that long; the tables of `threads` are those in use from now on."""
        if threads != self._threads:
            self._use(threads)
        self.now.observe(rows, seconds, _PROMPT_NOISE if prompt_rows else NOISE)

    def recall(self, tables: Mapping[int, RowCosts]) -> None:
        """Starts from what was learnt before, by threads."""
        if tables:
            self.tables.update(tables)
            self.now, self._threads = self.tables[max(self.tables)], max(self.tables)

    def _use(self, threads: int) -> None:
        table = self.tables.get(threads)
        if table is None:
            known = self.now.has_scale
            seconds = self.now.seconds(1) if known else None
            table = self.tables[threads] = RowCosts(self._shape, seconds=seconds, doubt=_OTHER_THREADS_DOUBT)
        self.now, self._threads = table, threads


class DraftCosts:
    """What one computing drafter costs, in passes of one row of the target, so that a busy core changes little.

    Args:
        relative: first guess of its pass for one request over the target's, such as the ratio of the bytes of their
            weights; None if there is none.
        shape: see `RowCosts`; rows are requests.
        row: first guess of a row of catching up; follows from the others if None.
        num_calls: that were timed before.

    Attributes:
        passes: of one token for so many requests.
        row: price of a row of catching up.
        stops: whether it stops drafting where it was told to.
        wide: its pass where drafts may branch, over one of chains.
    """

    def __init__(
        self,
        relative: float | None = None,
        shape: Sequence[tuple[float, float]] = NATIVE_SHAPE,
        *,
        row: float | None = None,
        num_calls: int = 0,
    ) -> None:
        guess = UNKNOWN_RELATIVE if relative is None else relative
        self.passes = RowCosts(shape, seconds=guess, doubt=1.5 if relative is None else 0.7)
        self.row = row if row is not None else guess * (RowCosts(shape, seconds=1.0).seconds(64) - 1.0) / 63.0
        self.num_calls = num_calls
        self.stops = False
        self.wide = _WIDE

    def call(self, num_requests: int, num_rounds: int, catch_up_rows: int) -> float:
        """Expected price of a call."""
        return num_rounds * self.passes.seconds(num_requests) + catch_up_rows * self.row

    def observe(self, call: DraftCall, unit: float) -> None:
        """A call took that long.

        Args:
            call: that was made.
            unit: seconds of a pass of one row of the target, now.
        """
        if not 0.0 < call.seconds < math.inf or (call.num_rounds < 1 and call.catch_up_rows < 1):
            return
        rounds = call.num_rounds * self.passes.seconds(call.num_requests)
        expected = rounds + call.catch_up_rows * self.row
        factor = call.seconds / (unit * expected)
        share = rounds / expected
        if self.num_calls and 2 * call.num_wide >= max(1, call.num_requests):
            if share > _FEW_SHARE:
                found = (factor - 1.0 + share) / share  # of the rounds alone
                self.wide += _WIDE_STEP * (max(0.5 * self.wide, min(2.0 * self.wide, found)) - self.wide)
            return
        if not self.num_calls:
            # All guesses were made together, so they are wrong together. First calls also make what is made once.
            self.passes.observe(max(1, call.num_requests), self.passes.seconds(call.num_requests) * factor, 3.0 * NOISE)
            self.row *= factor**0.9
        else:
            if share > _FEW_SHARE:
                one = self.passes.seconds(call.num_requests)
                self.passes.observe(max(1, call.num_requests), one * factor, NOISE / share)
            if share < 1.0 - _FEW_SHARE:
                self.row *= max(0.5, min(2.0, factor)) ** (0.3 * (1.0 - share))
        self.num_calls += 1

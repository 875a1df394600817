"""Seconds of a model's pass by its number of rows, learnt from the passes themselves.

The logarithm of the seconds at a knot is  scale + prior shape + deviation.  The scale is common to all rows and moves
fast (a core gets busy); the deviations are the shape and move slowly. What is not known is a covariance over both, in
which the deviation is a Brownian motion over the logarithm of the rows: none at one row, and neighbours deviate alike,
so a knot never seen follows its neighbours. One Kalman update a pass keeps scale and shape apart: after many passes
with the same rows a change can only be the scale; when rows alternate, their difference can only be the shape.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["KNOTS", "NATIVE_SHAPE", "RowCosts"]

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

NATIVE_SHAPE = ((1, 1.0), (5, 1.35), (8, 1.7), (16, 2.7), (32, 4.7), (512, 70.0))
"""Seconds relative to one row, with the native kernels."""

NOISE = 0.1
"""Standard deviation of one pass, relative."""

_SCALE_DRIFT = 0.03  # of the scale from pass to pass, relative
_SHAPE_DOUBT = 0.25  # of the prior shape, relative, for every factor of e in rows
_SHAPE_DRIFT = 2e-4  # of that doubt comes back with every pass
_DRIFT_EVERY = 8  # passes at a time
_UNKNOWN_SCALE = 10.0  # standard deviation of the logarithm
_RECALLED_DOUBT, _RECALLED_SHAPE_DOUBT = 0.3, 0.25  # of what was learnt another day; the second over a fresh one's
_WIDEST = 2.5  # standard deviations; a residual beyond counts as this many if the one before was beyond too
_STALL = 0.75  # else as this many
_SHAKEN = 0.05  # of the doubt of the prior shape comes back with every pass that is far off like the one before

_LOG_ROWS = np.log(np.array(KNOTS, dtype=np.float64))


class RowCosts:
    """Seconds by rows; never falling with rows.

    Args:
        shape: (rows, seconds relative to any common unit) pairs in rising order, the first guess of the shape;
            between them and beyond it goes on linearly.
        seconds: first guess of a pass of one row; None if there is none.
        doubt: standard deviation of the logarithm of that guess.
    """

    def __init__(
        self,
        shape: Sequence[tuple[float, float]] = NATIVE_SHAPE,
        *,
        seconds: float | None = None,
        doubt: float = 0.5,
    ) -> None:
        self._log_shape = _log_shape(shape)
        size = len(KNOTS) + 1
        self._state = np.zeros(size)
        self._state[0] = 0.0 if seconds is None else math.log(seconds)
        self._prior = np.zeros((size, size))
        self._prior[1:, 1:] = _SHAPE_DOUBT**2 * np.minimum.outer(_LOG_ROWS, _LOG_ROWS)
        self._covariance = self._prior.copy()
        self._covariance[0, 0] = (_UNKNOWN_SCALE if seconds is None else doubt) ** 2
        self._regain = self._prior * (_DRIFT_EVERY * _SHAPE_DRIFT)
        self._knots: list[float] | None = None
        self._table: list[float] = []  # of 1, 2, ... rows, as far as anybody asked
        self._far_off = 0.0
        self._changing = False
        self.num_passes = 0
        self.has_scale = seconds is not None

    def seconds(self, rows: int) -> float:
        """Of a pass of `rows` rows; of one row for less."""
        knots = self._at_knots()
        if rows <= 8:
            return knots[rows - 1] if rows > 1 else knots[0]
        low = min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1
        begin, end = KNOTS[low], KNOTS[low + 1]
        return knots[low] + (knots[low + 1] - knots[low]) * (rows - begin) / (end - begin)

    def table(self, first: int, count: int) -> list[float]:
        """Seconds of `first`, `first` + 1, ... rows, `count` of them."""
        knots = self._at_knots()
        if first + count <= 9:
            return knots[first - 1 : first - 1 + count]
        if len(self._table) < first + count - 1:
            self._extend(knots, first + count - 1)
        return self._table[first - 1 : first - 1 + count]

    def _extend(self, knots: Sequence[float], rows: int) -> None:
        """Makes the table of all numbers of rows go to this one, whole stretches between two knots at a time."""
        table = self._table = list(knots[:8])
        low = 7
        while len(table) < rows:
            begin, end = KNOTS[low], KNOTS[low + 1]
            slope = (knots[low + 1] - knots[low]) / (end - begin)
            last = low == len(KNOTS) - 2
            most = math.inf if last else knots[low + 1]  # which rounding may not exceed
            steps = range(1, (max(end, rows) if last else end) - begin + 1)
            table += [min(most, knots[low] + slope * each) for each in steps]
            low += 1

    def doubt(self, rows: int, others: int) -> float:
        """What is not known of the seconds of `rows`, over those of `others` rows: a standard deviation, relative.

        0 if those of `others` are known no better: then it is not `rows` that should be looked at.
        """
        one, two = _nearest(rows), _nearest(others)
        covariance = self._covariance
        own, other = float(covariance[one, one]), float(covariance[two, two])
        if own + 2.0 * float(covariance[0, one]) <= other + 2.0 * float(covariance[0, two]):
            return 0.0
        return math.sqrt(max(0.0, own + other - 2.0 * float(covariance[one, two])))

    def observe(self, rows: int, seconds: float, noise: float = NOISE) -> None:
        """A pass took that long; ignored if that is no positive number.

        Args:
            rows: of the pass, at least 1.
            seconds: it took.
            noise: relative standard deviation of such a measurement.
        """
        if not 0.0 < seconds < math.inf:
            return
        covariance = self._covariance
        covariance[0, 0] += _SCALE_DRIFT**2
        if self.num_passes % _DRIFT_EVERY == 0:
            covariance *= 1.0 - _DRIFT_EVERY * _SHAPE_DRIFT
            covariance += self._regain
        low, weight = _position(rows)
        along = covariance[0] + covariance[low]
        if weight:
            along += weight * (covariance[low + 1] - covariance[low])
        towards = along[low] if not weight else along[low] + weight * (along[low + 1] - along[low])
        spread = float(along[0] + towards) + noise * noise
        residual = math.log(seconds / self.seconds(rows))
        sd = math.sqrt(spread)
        gain = along / spread
        self._state += gain * (sd * self._believed(residual / sd))
        covariance -= gain[:, None] * along
        if self._changing:
            self._shake(low + (weight > 0.5))
        self._knots = None
        self.num_passes += 1
        self.has_scale = True

    def _believed(self, deviations: float) -> float:
        """How far a residual, in standard deviations, is believed.

        One that is far off is a stall and says little; if the next one is off the same way, the world has changed.
        """
        far = abs(deviations) > _WIDEST
        again = self._changing = far and self._far_off * deviations > 0.0
        self._far_off = deviations if far else 0.0
        if not far:
            return deviations
        return math.copysign(_WIDEST if again else _STALL, deviations)

    def _shake(self, at: int) -> None:
        """The world is changing, and who knows what other numbers of rows cost now, over those at this knot.

        Their doubt grows by a Brownian motion that is none here, so that these passes still move the scale alone.
        """
        prior, covariance = self._prior, self._covariance
        covariance += _SHAKEN * prior
        covariance[0, 1:] -= _SHAKEN * prior[at, 1:]
        covariance[1:, 0] -= _SHAKEN * prior[1:, at]
        covariance[0, 0] += _SHAKEN * prior[at, at]

    def state(self) -> list[float]:
        """[len(KNOTS)] seconds at the knots, for `recalled`."""
        return list(self._at_knots())

    @classmethod
    def recalled(cls, seconds: Sequence[float]) -> RowCosts:
        """Starts from what was learnt before, as a first guess.

        Raises:
            ValueError: not as many numbers as knots, or one that is no positive number.
        """
        if len(seconds) != len(KNOTS) or not all(0.0 < value < math.inf for value in seconds):
            raise ValueError(f"seconds {seconds!r}: give {len(KNOTS)} positive numbers")
        costs = cls(tuple(zip(KNOTS, seconds, strict=True)), seconds=seconds[0], doubt=_RECALLED_DOUBT)
        costs._covariance[1:, 1:] *= _RECALLED_SHAPE_DOUBT
        return costs

    def _at_knots(self) -> list[float]:
        """Seconds at the knots. What falls with rows is evened out, half up and half down."""
        if self._knots is None:
            raw = self._state[1:] + self._log_shape
            raw += self._state[0]
            knots: list[float] = np.exp(raw).tolist()
            self._table = []
            self._knots = knots if knots == sorted(knots) else _evened(np.array(knots))
        return self._knots


def _evened(raw: NDArray[np.float64]) -> list[float]:
    up = np.maximum.accumulate(raw)
    down = np.minimum.accumulate(raw[::-1])[::-1]
    result: list[float] = (0.5 * (up + down)).tolist()
    return result


def _log_shape(shape: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """[len(KNOTS)] logarithms, 0 at one row."""
    rising = all(before[0] < behind[0] for before, behind in pairwise(shape))
    if not shape or not rising or any(cost <= 0 for _, cost in shape):
        raise ValueError(f"shape {shape!r}: give (rows, cost) pairs with rising rows and costs above 0")
    rows = np.array([pair[0] for pair in shape], dtype=np.float64)
    costs = np.array([pair[1] for pair in shape], dtype=np.float64)
    knots = np.array(KNOTS, dtype=np.float64)
    values = np.interp(knots, rows, costs)
    if len(shape) > 1:
        slope = max(0.0, (costs[-1] - costs[-2]) / (rows[-1] - rows[-2]))
        values = np.where(knots > rows[-1], costs[-1] + slope * (knots - rows[-1]), values)
    log_values: NDArray[np.float64] = np.log(np.maximum.accumulate(values / values[0]))
    return log_values


def _position(rows: int) -> tuple[int, float]:
    """Index in the state of the knot at or below `rows`, and how far it is to the next, 0 to 1."""
    if rows <= 8:
        return max(rows, 1), 0.0
    if rows >= KNOTS[-1]:
        return len(KNOTS), 0.0
    low = bisect_right(KNOTS, rows)
    return low, (rows - KNOTS[low - 1]) / (KNOTS[low] - KNOTS[low - 1])


def _nearest(rows: int) -> int:
    low, weight = _position(rows)
    return low + (weight > 0.5)

"""The race: the token with the highest score s + g in a set, without scoring the whole set.

Float32 numpy passes give every token an upper bound of its score; the few that could still win are scored by the
definition, in float64. So the winner is the definition's, however the passes round.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from outpace.sampling.noise import NoiseKey, gumbel, high_bits

__all__ = ["Floats", "Indices", "RowContext", "Tokens", "race", "scratch"]

Floats: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.intp]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_LOG2E = 1 / math.log(2)

_UNIT = 2.0**23
"""Screening scores are counted in 2**-23 bits, as a float32 counts its own logarithm."""

_SCREEN_MARGIN = 1e-3 * _UNIT
"""Error bound of a screening score. A token that can win has s >= -41 (the noise is bounded), so three float32
roundings cost it at most 60 * 3 * 2**-24 bits, and those of its noise and of the sum 2**-15: a tenth of this margin."""

_HIGHEST_SCREEN = 33 * _UNIT
"""Above the screening score of any token whose 32 bits are not all zero: s <= 0 and log2 v >= -32."""


class _Scratch(threading.local):
    """Memory by name, kept per thread: pages fresh from the system would cost more than what is computed in them."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.generic]] = {}

    def take(self, name: str, size: int, kind: type[_Scalar]) -> NDArray[_Scalar]:
        """[size] uninitialised; valid until the same name is taken again."""
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, kind)
        return cast("NDArray[_Scalar]", held[:size])


scratch = _Scratch()


@dataclass(frozen=True, slots=True)
class RowContext:
    """One row being sampled, and what all its stages need to know."""

    best: float
    temperature: float
    key: NoiseKey

    def scaled(self, value: float) -> float:
        return (value - self.best) / self.temperature


@dataclass(frozen=True, slots=True)
class Tokens:
    """A set of tokens in ascending order of id: a prefix of the order (value, then lowest id).

    Args:
        ids: [n] ids, or None for the whole vocabulary.
        values: [n] their logits.
    """

    ids: Indices | None
    values: Floats

    def take(self, index: Indices) -> Tokens:
        return Tokens(index if self.ids is None else self.ids[index], self.values[index])

    def id_at(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


def race(tokens: Tokens, row: RowContext) -> int:
    """Index of the token with the highest score, by the definition.

    Token i wins if E_i / w_i is smallest, with w_i = exp(s_i) and E_i = -log(1 - v_i) >= v_i (the exponential race).
    So log2 w_i - (lower bound of log2 v_i) is never below its score in bits, and whoever stays under the score of the
    token that leads by this measure is out. One to three tokens are left.
    """
    screen = _screening_scores(tokens, row)

    def score(index: int) -> float:
        return row.scaled(float(tokens.values[index])) + gumbel(row.key, tokens.id_at(index))

    lead = int(screen.argmax())
    unbounded = []  # tokens whose 32 bits are all zero: their noise has no useful bound, so they cannot set the bar
    while screen[lead] > _HIGHEST_SCREEN:
        unbounded.append(lead)
        screen[lead] = -np.inf
        lead = int(screen.argmax())
    bar = score(lead) * _LOG2E * _UNIT - _SCREEN_MARGIN
    left: list[int] = np.flatnonzero(screen >= np.float32(bar)).tolist()
    return max(left + unbounded, key=lambda index: (score(index), -index))


def _screening_scores(tokens: Tokens, row: RowContext) -> Floats:
    """[n] upper bounds of the tokens' scores, in units of 2**-23 bits; scratch memory, good until the next call.

    A float32's exponent and mantissa, read as one integer, are 2**23 * (log2 x + 127) less up to 0.0861 * 2**23: a
    logarithm for the price of a conversion, and a lower bound.
    """
    size = tokens.values.size
    bits, work = scratch.take("bits", size, np.uint32), scratch.take("work", size, np.uint32)
    high_bits(row.key, size if tokens.ids is None else tokens.ids, out=bits, work=work)
    as_float, log2_noise = work.view(np.float32), bits.view(np.float32)
    np.copyto(as_float, bits, casting="unsafe")
    np.copyto(log2_noise, work.view(np.int32), casting="unsafe")
    screen = scratch.take("screen", size, np.float32)
    np.subtract(tokens.values, np.float32(row.best), out=screen)
    screen *= np.float32(_LOG2E * _UNIT / row.temperature)
    screen -= log2_noise
    screen += np.float32((127 + 32) * _UNIT)
    return screen

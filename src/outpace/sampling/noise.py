"""Counter-based noise: a pure function of (seed, choice number, position, purpose, token id).

Nothing is drawn from a stream, so nothing can get out of step: any token's noise can be computed alone, in any order,
on any machine. The fields that a row shares go through BLAKE2b once and become a key; a token id is then hashed with
that key, many at a time in numpy or one at a time in Python, to the same bits.

The noise of a token is v = (52 random bits + 1/2) / 2**52, strictly between 0 and 1 and exact in float64; from it come
E = -log(1 - v), exponential, and g = -log(E), Gumbel. The first 32 bits alone bound v from below, which is enough to
discard nearly every token before any logarithm is taken.

The integer mixers are `triple32` and `lowbias32` of C. Wellons' hash prospector (released into the public domain).
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outpace.types import Choice, Purpose

__all__ = ["MAX_GUMBEL", "NoiseKey", "gumbel", "high_bits", "key_of", "noise_bits", "noise_key", "uniform"]

_MASK = 0xFFFFFFFF
_SMALLEST_TABLE = 1 << 16

MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-53)))
"""No token's Gumbel noise exceeds this (about 36.7); none is below -log(53 log 2), about -3.6."""


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Two pairs of 32-bit keys, one pair for the high bits of the noise and one for the low bits."""

    high: tuple[int, int]
    low: tuple[int, int]


def noise_key(seed: int, number: int, position: int, purpose: Purpose, origin: int | None = None) -> NoiseKey:
    """The key that all tokens of one row share.

    Args:
        seed: the request's seed, any integer.
        number: which of the request's n choices.
        position: absolute position of the token being chosen.
        purpose: what the noise is for.
        origin: see `Choice.origin`.
    """
    fields = f"{int(purpose)}:{seed}:{number}:{position}" + ("" if origin is None else f":{origin}")
    a, b, c, d = struct.unpack("<4I", hashlib.blake2b(fields.encode(), digest_size=16).digest())
    return NoiseKey(high=(a, b), low=(c, d))


def key_of(choice: Choice) -> NoiseKey:
    """The key of one row."""
    return noise_key(choice.seed, choice.number, choice.position, choice.purpose, choice.origin)


def high_bits(
    key: NoiseKey,
    ids: NDArray[np.intp] | int,
    out: NDArray[np.uint32] | None = None,
    work: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint32]:
    """The 32 high bits of the noise of many tokens.

    Args:
        key: of the row.
        ids: [n] token ids, or a count n, meaning the ids 0 to n - 1.
        out: [n] where the result goes; fresh memory costs more than the arithmetic here.
        work: [n] overwritten.

    Returns:
        [n] h, with h / 2**32 <= v < (h + 1) / 2**32.
    """
    count, highest = (ids, ids) if isinstance(ids, int) else (ids.size, int(ids.max(initial=0)) + 1)
    x = np.empty(count, np.uint32) if out is None else out
    y = np.empty(count, np.uint32) if work is None else work
    table = _id_table(_table_size(highest))
    spread = table[:ids] if isinstance(ids, int) else np.take(table, ids, out=x, mode="clip")
    np.bitwise_xor(spread, np.uint32(key.high[0]), out=x)
    np.right_shift(x, np.uint32(16), out=y)
    x ^= y
    x *= np.uint32(0x7FEB352D)
    np.right_shift(x, np.uint32(15), out=y)
    x ^= y
    x ^= np.uint32(key.high[1])
    x *= np.uint32(0x846CA68B)
    np.right_shift(x, np.uint32(16), out=y)
    x ^= y
    return x


def noise_bits(key: NoiseKey, token: int) -> int:
    """The 52 bits of one token's noise: those of `high_bits`, then 20 more."""
    spread = _spread(token)
    return _keyed(spread, key.high) << 20 | _keyed(spread, key.low) >> 12


def gumbel(key: NoiseKey, token: int) -> float:
    """Gumbel noise of one token, the definition that every faster way has to reproduce."""
    return -math.log(-math.log1p(-uniform(key, token)))


def uniform(key: NoiseKey, token: int) -> float:
    """A token's noise v itself, strictly between 0 and 1."""
    return (noise_bits(key, token) + 0.5) * 2.0**-52


def _keyed(x: int, key: tuple[int, int]) -> int:
    """`lowbias32` with key material before each of its two multiplications."""
    x ^= key[0]
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x ^= key[1]
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def _spread(token: int) -> int:
    """`triple32`: neighbouring ids become unrelated numbers, so that the keyed rounds start from full entropy."""
    x = token & _MASK
    x ^= x >> 17
    x = x * 0xED5AD4BB & _MASK
    x ^= x >> 11
    x = x * 0xAC4C1B51 & _MASK
    x ^= x >> 15
    x = x * 0x31848BAB & _MASK
    return x ^ x >> 14


def _table_size(count: int) -> int:
    return max(_SMALLEST_TABLE, 1 << (count - 1).bit_length())


@lru_cache(maxsize=4)
def _id_table(size: int) -> NDArray[np.uint32]:
    """`_spread` of the ids 0 to size - 1; the same for every row, so it is computed once."""
    x = np.arange(size, dtype=np.uint32)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    x.flags.writeable = False
    return x

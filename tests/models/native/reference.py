"""What packing and products have to give, slowly, in numpy, from the rules that matrix.c and pack.c state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.quants import Q4_K

from tests.models.native.kinds import FOUR_BITS, Bytes, Floats

GROUP = 32
f32 = np.float32
Numbers = np.ndarray[Any, np.dtype[Any]]


def half(values: Numbers) -> Floats:
    """Rounded to float16 and back."""
    return np.asarray(values, dtype=np.float16).astype(f32)


def in_groups(rows: Floats) -> Floats:
    """[R, inputs] -> [R, groups, 32], with zeros behind the last input."""
    count, width = rows.shape
    padded = np.zeros((count, -(-width // GROUP) * GROUP), f32)
    padded[:, :width] = rows
    return padded.reshape(count, -1, GROUP)


@dataclass(frozen=True)
class Integers:
    """A matrix of integers: weight = scale * number - minimum.

    Args:
        numbers: [outputs, groups, 32 (or 16)].
        scale: [outputs, groups].
        minimum: [outputs, groups].
    """

    numbers: Numbers
    scale: Floats
    minimum: Floats

    @property
    def weights(self) -> Floats:
        """[outputs, padded inputs]."""
        weights = self.scale[:, :, None] * self.numbers - self.minimum[:, :, None]
        return np.asarray(weights, dtype=f32).reshape(len(weights), -1)


def eight_bits(floats: Floats) -> Integers:
    """Each group's largest magnitude becomes 127."""
    weights = in_groups(floats)
    scale = half(abs(weights).max(-1) / f32(127))
    safe = np.where(scale > 0, scale, f32(1))
    numbers = np.where(scale[:, :, None] > 0, np.rint(weights / safe[:, :, None]), f32(0)).clip(-127, 127)
    return Integers(numbers, scale, np.zeros_like(scale))


def four_bits(floats: Floats) -> Integers:
    """The numbers 0 to 15 run from each group's least to its largest weight, 0 included."""
    weights = in_groups(floats)
    least, most = np.minimum(weights.min(-1), 0), np.maximum(weights.max(-1), 0)
    scale, minimum = half((most - least) / f32(15)), half(-least)
    safe = np.where(scale > 0, scale, f32(1))
    numbers = np.rint((weights + minimum[:, :, None]) / safe[:, :, None])
    return Integers(np.where(scale[:, :, None] > 0, numbers, f32(0)).clip(0, 15), scale, minimum)


def own_four_bits(kind: str, rows: Bytes) -> Integers:
    """The numbers that blocks of at most four bits hold; scales and minima rounded to float16."""
    count = len(rows)
    blocks = rows.reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}[kind])

    def halves(at: int) -> Floats:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(f32)

    if kind == "Q4_K":
        small, least = Q4_K.get_scale_min(blocks[:, 4:16])
        scale, minimum = halves(0) * small.astype(f32), halves(2) * least.astype(f32)
        pairs = blocks[:, 16:].reshape(-1, 4, 1, GROUP)
        numbers = (pairs >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & 15
    else:
        scale = halves(0)
        minimum = 8 * scale if kind == "Q4_0" else -halves(2)
        packed = blocks[:, 2 if kind == "Q4_0" else 4 :]
        numbers = np.concatenate((packed & 15, packed >> 4), axis=-1)
    scale, minimum = half(scale.reshape(count, -1)), half(minimum.reshape(count, -1))
    return Integers(numbers.reshape(count, -1, GROUP).astype(f32), scale, minimum)


def own_six_bits(kind: str, rows: Bytes) -> Integers:
    """The numbers of up to six bits that blocks hold, from -32 to 31, in groups of 16; scales rounded to float16."""
    blocks = rows.reshape(-1, {"Q5_0": 22, "Q6_K": 210}[kind])
    if kind == "Q5_0":
        scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(f32).repeat(2, 1)
        high = np.ascontiguousarray(blocks[:, 2:6]).view("<u4") >> np.arange(GROUP, dtype=np.uint32) & 1
        packed = blocks[:, 6:]
        numbers = np.concatenate((packed & 15, packed >> 4), axis=-1) + 16 * high.astype(np.int64) - 16
    else:
        whole = np.ascontiguousarray(blocks[:, 208:]).view("<f2").astype(f32)
        scale = whole * blocks[:, 192:208].view(np.int8).astype(f32)
        fours, twos = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
        low = (fours >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15).reshape(-1, 2, 4, 32)
        high = twos >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
        numbers = low.astype(np.int64) + 16 * high.astype(np.int64) - 32
    scale = half(scale.reshape(len(rows), -1))
    return Integers(numbers.reshape(len(rows), -1, GROUP // 2), scale, np.zeros_like(scale))


def integers(kind: str, data: Bytes, floats: Floats, format: str) -> Integers:
    """What pack.c makes of a matrix in an integer format."""
    if format == "Q6":
        return own_six_bits(kind, data)
    if format == "Q8":
        return eight_bits(floats)
    return own_four_bits(kind, data) if kind in FOUR_BITS else four_bits(floats)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once (to within a rounding of a rounding)."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(f32)


def product(rows: Floats, matrix: Integers, steps: int) -> Floats:
    """Rows [R, inputs], rounded to `steps` either side of zero by group, times a matrix: [R, outputs] float32."""
    x = in_groups(rows)
    most = abs(x).max(-1)
    factor = np.where(most < 1e-30, f32(0), f32(steps) / np.maximum(most, f32(1e-30)))
    scale = (np.where(most < 1e-30, f32(0), most) / f32(steps)).astype(f32)
    whole = np.rint(x * factor[:, :, None].astype(f32))
    sums = np.zeros((len(x), len(matrix.numbers)), f32)
    parts = matrix.numbers.shape[1] // x.shape[1]  # of a group, each with a scale of its own
    whole = whole.reshape(len(x), matrix.numbers.shape[1], -1)
    scale = scale.repeat(parts, 1)
    for g in range(whole.shape[1]):
        exact = whole[:, g].astype(np.int64) @ matrix.numbers[:, g].astype(np.int64).T
        both = scale[:, g, None] * matrix.scale[None, :, g]
        sums = fused(exact.astype(f32), both, sums)
        total = scale[:, g] * whole[:, g].sum(-1, dtype=f32)
        sums = fused(-matrix.minimum[None, :, g], total[:, None], sums)
    return sums

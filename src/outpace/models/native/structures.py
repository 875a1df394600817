"""The structures of outpace.h, layers.h and pack.c, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_void_p
from typing import TypeAlias

from outpace.types import Segment

__all__ = [
    "Format",
    "InputsStruct",
    "LayerStruct",
    "MatrixStruct",
    "PackingStruct",
    "RunStruct",
    "SegmentStruct",
    "ShapeStruct",
    "Source",
    "path_lines",
    "segment_struct",
]


class Format:
    """`enum Format` of outpace.h."""

    F32, BF16, F16, Q8, Q4, Q6 = range(6)


class Source:
    """`enum Source` of pack.c."""

    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K = range(9)


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("padded", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
    ]


class InputsStruct(ctypes.Structure):
    _fields_ = [
        ("count", c_int32),
        ("padded", c_int32),
        ("groups", c_int32),
        ("values", c_void_p),
        ("bytes", c_void_p),
        ("words", c_void_p),
        ("byte_scale", c_void_p),
        ("byte_sum", c_void_p),
        ("half_sums", c_void_p),
        ("word_scale", c_void_p),
    ]


class PackingStruct(ctypes.Structure):
    _fields_ = [
        ("source", c_int32),
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("padded", c_int32),
        ("threads", c_int32),
        ("row_bytes", c_size_t),
        ("rows", c_void_p),
        ("panels", c_void_p),
        ("failed", c_int32),
    ]


class ShapeStruct(ctypes.Structure):
    _fields_ = [
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("wide", c_int32),
        ("epsilon", c_float),
        ("query_scale", c_float),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("stream_norm", c_void_p),
        ("query", MatrixStruct),
        ("key", MatrixStruct),
        ("value", MatrixStruct),
        ("out", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("window", c_int32),
        ("adds_to_normed", c_int32),
    ]


class SegmentStruct(ctypes.Structure):
    _fields_ = [
        ("lane", c_int32),
        ("begin", c_int32),
        ("end", c_int32),
        ("first_slot", c_int32),
        ("straight", c_int32),
        ("fork", c_int32),
        ("stride", c_int32),
        ("paths", c_void_p),
    ]


Lines: TypeAlias = "ctypes.Array[ctypes.c_int32] | None"


def path_lines(segment: Segment) -> Lines:
    """A segment's paths, a line of the same length each: how many slots, then these. None if there are no paths."""
    if not segment.paths:
        return None
    most = max(map(len, segment.paths))
    numbers: list[int] = []
    for path in segment.paths:
        numbers += (len(path), *path, *([0] * (most - len(path))))
    return (c_int32 * len(numbers))(*numbers)


def segment_struct(segment: Segment, lines: Lines) -> SegmentStruct:
    """A segment with its `path_lines`, which have to outlive it."""
    place = SegmentStruct(segment.lane, segment.begin, segment.end, segment.first_slot)
    place.straight = segment.begin + segment.num_straight
    if lines is not None:
        place.fork, place.stride = segment.fork, len(lines) // len(segment.paths)
        place.paths = ctypes.addressof(lines)
    return place


class RunStruct(ctypes.Structure):
    _fields_ = [
        ("shape", c_void_p),
        ("layers", c_void_p),
        ("begin", c_int32),
        ("end", c_int32),
        ("rows", c_int32),
        ("segments", c_int32),
        ("capacity", c_int32),
        ("threads", c_int32),
        ("hidden", c_void_p),
        ("turns", c_void_p),
        ("segment", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("beside", c_void_p),
        ("entering", c_void_p),
        ("keep", c_void_p),
        ("kept", c_int32),
        ("joined", InputsStruct),
        ("normed", InputsStruct),
        ("mixed", InputsStruct),
        ("gated", InputsStruct),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("up", c_void_p),
    ]

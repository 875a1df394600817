"""The structures of outpace.h, layers.h and pack.c, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_void_p

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
        ("query", MatrixStruct),
        ("key", MatrixStruct),
        ("value", MatrixStruct),
        ("out", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("window", c_int32),
    ]


class SegmentStruct(ctypes.Structure):
    _fields_ = [("lane", c_int32), ("begin", c_int32), ("end", c_int32), ("first_slot", c_int32)]


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
        ("entering", c_void_p),
        ("keep", c_void_p),
        ("kept", c_int32),
        ("normed", InputsStruct),
        ("mixed", InputsStruct),
        ("gated", InputsStruct),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("up", c_void_p),
    ]

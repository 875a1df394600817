"""The functions that the C files share among themselves, called one at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from outpace.models.native.library import library
from outpace.models.native.structures import (
    Format,
    InputsStruct,
    LayerStruct,
    MatrixStruct,
    RunStruct,
    ShapeStruct,
    path_lines,
    segment_struct,
)
from outpace.types import Segment

GROUP = 32


class Inputs:
    """Rows on their way into a product, [R, inputs] float32, in all the forms that matrices need."""

    def __init__(self, rows: torch.Tensor) -> None:
        count, width = rows.shape
        groups = -(-width // GROUP)
        self.values = torch.zeros(count, groups * GROUP)
        self.values[:, :width] = rows
        self.bytes = torch.zeros(count, groups * GROUP, dtype=torch.int8)
        self.words = torch.zeros(count, groups * GROUP, dtype=torch.int16)
        self.byte_scale, self.byte_sum, self.word_scale = (torch.zeros(count, groups) for _ in range(3))
        self.half_sums = torch.zeros(count, 2 * groups, dtype=torch.int32)
        forms = ("values", "bytes", "words", "byte_scale", "byte_sum", "half_sums", "word_scale")
        self.struct = InputsStruct(count=count, padded=groups * GROUP, groups=groups)
        for name in forms:
            setattr(self.struct, name, getattr(self, name).data_ptr())
        assert {field[0] for field in InputsStruct._fields_} == {"count", "padded", "groups", *forms}
        for row in range(count):
            library().quantise(ctypes.byref(self.struct), row, 0, groups, 1 << Format.Q8 | 1 << Format.Q4)


def num_tasks(matrix: MatrixStruct) -> int:
    """Into how many tasks a product with this matrix is divided."""
    return int(library().product_tasks(ctypes.byref(matrix)))


def multiply(
    matrix: MatrixStruct, rows: torch.Tensor, onto: torch.Tensor | None = None, tasks: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows [R, inputs] times a packed matrix, added to `onto` [R, outputs] if given: [R, outputs] float32.

    Only these tasks of it if they are given; the rest stays NaN.
    """
    inputs = Inputs(rows)
    result = torch.full((len(rows), matrix.outputs), float("nan")) if onto is None else onto.clone()
    for task in range(num_tasks(matrix)) if tasks is None else tasks:
        library().product(
            ctypes.byref(matrix),
            ctypes.byref(inputs.struct),
            task,
            ctypes.c_void_p(result.data_ptr()),
            matrix.outputs,
            int(onto is not None),
        )
    return result


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
    *,
    each: int | None = None,
) -> torch.Tensor:
    """Attention of a pack's rows over one layer's cache.

    Args:
        query: [R, heads, dim] float32, scaled.
        keys: [lanes, kv heads, slots, dim] float32, those of the rows included; a multiple of 8 slots.
        values: the same.
        segments: where the rows belong, in order.
        window: slots a row sees at most.
        each: rows of a task; None as many as the kernels take.

    Returns:
        [R, heads, dim].
    """
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    keys, values, query = keys.contiguous(), values.contiguous(), query.contiguous()
    padded = -(-heads * dim // GROUP) * GROUP
    out = torch.full((rows, padded), float("nan"))
    shape = ShapeStruct(heads=heads, kv_heads=kv_heads, head_dim=dim)
    layer = LayerStruct(window=window or 0)
    pointers: list[Any] = [(ctypes.c_void_p * 1)(tensor.data_ptr()) for tensor in (keys, values)]
    run = RunStruct(
        shape=ctypes.addressof(shape),
        layers=ctypes.addressof(layer),
        rows=rows,
        segments=len(segments),
        capacity=capacity,
        keys=ctypes.addressof(pointers[0]),
        values=ctypes.addressof(pointers[1]),
        mixed=InputsStruct(count=rows, padded=padded, groups=padded // GROUP, values=out.data_ptr()),
        query=query.data_ptr(),
    )
    each = each or library().attention_rows(ctypes.byref(run))
    for segment in segments:
        lines = path_lines(segment)
        place = segment_struct(segment, lines)
        for begin in range(segment.begin, segment.end, each):
            for head in range(kv_heads):
                end = min(begin + each, segment.end)
                library().attend(ctypes.byref(run), 0, ctypes.byref(place), head, begin, end)
    return out[:, : heads * dim].view(rows, heads, dim)

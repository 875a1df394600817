"""Matrices of a checkpoint, packed into the panels of the native kernels or read row by row."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.errors import OutOfMemory, UnsupportedModel
from outpace.models.native.library import library
from outpace.models.native.pointers import address_of
from outpace.models.native.structures import Format, MatrixStruct, PackingStruct, Source
from outpace.models.precision import Precision
from outpace.models.weights import WeightSource

__all__ = ["PackedMatrices", "Stored", "bits_of", "format_of", "is_read_in_place", "packed_bytes", "source_of"]

PANEL, GROUP = 8, 32
_GROUP_BYTES = {Format.F32: 128, Format.BF16: 64, Format.F16: 64, Format.Q8: 34, Format.Q4: 20, Format.Q6: 28}
"""Bytes of a group of inputs of one output, scales included; see matrix.c."""
_HUGE_PAGE = 2 << 20

_BLOCK_SOURCES = {
    "Q4_0": Source.Q4_0,
    "Q4_1": Source.Q4_1,
    "Q5_0": Source.Q5_0,
    "Q8_0": Source.Q8_0,
    "Q4_K": Source.Q4_K,
    "Q6_K": Source.Q6_K,
}
_FLOAT_SOURCES = {torch.float32: Source.F32, torch.float16: Source.F16, torch.bfloat16: Source.BF16}
_SOURCE_DTYPES = {source: dtype for dtype, source in _FLOAT_SOURCES.items()}  # the others are bytes
_FLOAT_FORMATS = {Source.F32: Format.F32, Source.F16: Format.F16, Source.BF16: Format.BF16}
_FOUR_BITS = frozenset({Source.Q4_0, Source.Q4_1, Source.Q4_K})
_SIX_BITS = frozenset({Source.Q5_0, Source.Q6_K})
_DTYPES = {"float32": Format.F32, "float16": Format.F16, "bfloat16": Format.BF16}


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix where it is stored, in one of the ways that pack.c reads.

    Args:
        source: how a row is stored.
        data: [outputs, ...] of bytes or floats; rows follow each other.
        outputs: rows.
        inputs: weights a row.
        in_place: the data are the checkpoint's own, not a copy.
        blocks: the checkpoint stores blocks, of whatever kind.
    """

    source: int
    data: torch.Tensor
    outputs: int
    inputs: int
    in_place: bool = True
    blocks: bool = False

    @classmethod
    def find(cls, weights: WeightSource, name: str, outputs: int | None = None) -> Stored:
        """A matrix of a checkpoint, or its first `outputs` rows. KeyError if there is none of that name."""
        blocks = weights.blocks(name)
        if blocks is not None and blocks.kind in _BLOCK_SOURCES:
            rows, columns = blocks.shape
            data = blocks.data.contiguous()
            return cls(_BLOCK_SOURCES[blocks.kind], data, outputs or rows, columns, blocks=True)
        tensor = weights.get(name)
        in_place = blocks is None and tensor.dtype in _FLOAT_SOURCES
        if tensor.dtype not in _FLOAT_SOURCES:
            tensor = tensor.float()
        source = _FLOAT_SOURCES[tensor.dtype]
        return cls(source, tensor.contiguous(), outputs or len(tensor), tensor.shape[1], in_place, blocks is not None)

    @property
    def padded(self) -> int:
        """Inputs rounded up to whole groups."""
        return -(-self.inputs // GROUP) * GROUP

    def packing(self, format: int = Format.F32) -> PackingStruct:
        """What pack.c is told about it. ValueError if the data are not what `source` says."""
        return PackingStruct(
            source=self.source,
            format=format,
            outputs=self.outputs,
            inputs=self.inputs,
            padded=self.padded,
            threads=torch.get_num_threads(),
            row_bytes=self.data.stride(0) * self.data.element_size(),
            rows=address_of(self.data, _SOURCE_DTYPES.get(self.source, torch.uint8)),
        )

    def read_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [R] int64, each below `outputs`: [R, inputs] float32."""
        rows = torch.empty(len(ids), self.inputs, dtype=torch.float32, device="cpu")
        wanted, target = address_of(ids, torch.int64), address_of(rows, torch.float32)
        if library().read_rows(
            ctypes.byref(self.packing()), ctypes.c_void_p(wanted), len(ids), ctypes.c_void_p(target)
        ):
            raise OutOfMemory("no memory is left to read rows of the embedding")
        return rows


def source_of(kind: str | None, dtype: torch.dtype) -> int:
    """How pack.c reads a matrix stored as blocks of this kind, or (None) as floats of this type."""
    if kind is None:
        return _FLOAT_SOURCES.get(dtype, Source.F32)
    return _BLOCK_SOURCES.get(kind, Source.F16)


def is_read_in_place(kind: str | None, dtype: torch.dtype) -> bool:
    """Whether pack.c reads such a matrix where it lies, or needs a copy in floats."""
    return dtype in _FLOAT_SOURCES if kind is None else kind in _BLOCK_SOURCES


def format_of(precision: Precision, source: int, *, blocks: bool, head: bool = False) -> int:
    """The format a matrix is computed in.

    Args:
        precision: what was asked for; of the native kernels.
        source: how the matrix is stored.
        blocks: it is stored as blocks, whatever they are read as.
        head: it is the output head, which four bits would hurt most.
    """
    if precision.quantization == "none":
        return _DTYPES.get(precision.dtype, Format.F32 if blocks else _FLOAT_FORMATS[source])
    if precision.quantization == "int8":
        return Format.Q8
    if precision.quantization == "int4":
        return _as_stored(source, Format.Q8) if head else Format.Q4
    return _as_stored(source, Format.Q8 if blocks else _FLOAT_FORMATS[source])  # "file"


def _as_stored(source: int, otherwise: int) -> int:
    """The format that keeps the numbers of blocks of this kind, if there is one."""
    return Format.Q4 if source in _FOUR_BITS else Format.Q6 if source in _SIX_BITS else otherwise


def packed_bytes(format: int, outputs: int, inputs: int) -> int:
    """Memory of a packed matrix, in bytes."""
    return -(-outputs // PANEL) * PANEL * (-(-inputs // GROUP) * _GROUP_BYTES[format] + 4)


def bits_of(format: int) -> str:
    """A format in a few words, for people."""
    return {
        Format.F32: "fp32",
        Format.F16: "fp16 weights",
        Format.BF16: "bf16 weights",
        Format.Q8: "8-bit weights with 16-bit activations",
        Format.Q4: "4-bit weights with 8-bit activations",
        Format.Q6: "6-bit weights with 8-bit activations",
    }[format]


class PackedMatrices:
    """Some matrices packed side by side in memory of their own.

    Args:
        parts: matrices with their formats and biases ([outputs] or None); none of them is kept.

    Raises:
        OutOfMemory: the system has no memory.
        UnsupportedModel: a matrix too large for 32-bit sizes.
    """

    def __init__(self, parts: Sequence[tuple[Stored, int, torch.Tensor | None]]) -> None:
        for stored, _, _ in parts:
            _check_size(stored)
        self.weight_bytes = sum(packed_bytes(format, stored.outputs, stored.inputs) for stored, format, _ in parts)
        self._memory = _zeroed(self.weight_bytes)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.structs: list[MatrixStruct] = []
        for stored, format, bias in parts:
            packing = stored.packing(format)
            packing.panels = at
            if library().pack(ctypes.byref(packing)):
                raise OutOfMemory("no memory is left to pack the weights")
            bias_at = None
            end = at + packed_bytes(format, stored.outputs, stored.inputs)
            if bias is not None:
                bias_at = end - -(-stored.outputs // PANEL) * PANEL * 4
                values = bias.float().contiguous()
                ctypes.memmove(bias_at, address_of(values, torch.float32, (stored.outputs,)), values.nbytes)
            self.structs.append(
                MatrixStruct(format, stored.outputs, stored.inputs, stored.padded, panels=at, bias=bias_at)
            )
            at = end


def _check_size(stored: Stored) -> None:
    if stored.outputs * stored.padded >= 2**31:
        raise UnsupportedModel(
            f"a linear layer of {stored.outputs} x {stored.inputs} weights: the kernels take less than 2^31"
        )


def _zeroed(num_bytes: int) -> mmap.mmap:
    """Memory of the system, all zero; in huge pages where it is large, which spares the processor address lookups."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"the system has no {num_bytes / 1e6:.0f} MB for weights ({error})") from error
    if num_bytes >= 2 * _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

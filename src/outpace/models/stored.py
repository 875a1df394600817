"""Matrices in the block formats of GGML, as GGUF files hold them: their floats, their damage, their place on disk.

A block is a few weights of one row: small integers and the scales they share. Rows are independent, so rows can be
cut and reordered as bytes. Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; their values are
computed by the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

__all__ = [
    "FLOAT_KINDS",
    "QuantizedBlocks",
    "block_size",
    "dequantize_rows",
    "header_metadata",
    "kinds_in_metadata",
    "matrix_shape",
    "rows_are_finite",
    "to_half",
]

FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})
"""GGML kinds that are no blocks."""

# First byte of every float16 scale in a block. With finite scales all values of these formats are finite, and with
# another one none of its block's are numbers worth having; formats not named here are judged by their values.
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
_EXPONENT = 0x7C00  # of a float16; all ones are infinities and NaNs
_METADATA_KEY = "outpace.blocks"
_CHUNK_WEIGHTS = 4 << 20

Rows = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A matrix as a GGUF file stores it.

    Args:
        kind: GGML's name of the block format, as "Q4_K".
        shape: (rows, columns) of the matrix.
        data: [rows, bytes a row] uint8; it may share memory with a file, so it must not be changed, and may begin at
            any address, so that it is not aligned for wider numbers.

    Raises:
        ValueError: no such format, or data that do not fit the shape.
    """

    kind: str
    shape: tuple[int, int]
    data: torch.Tensor

    def __post_init__(self) -> None:
        held = matrix_shape(self.kind, self.data.dtype, tuple(self.data.shape))
        if held != self.shape:
            raise ValueError(f"{self.kind} data of shape {list(self.data.shape)} hold {held}, not {self.shape}")

    def dequantize(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Values of rows [begin, end), by default of all: [end - begin, columns] float32.

        Raises:
            ValueError: there are no such rows.
        """
        return torch.from_numpy(self._rows(begin, self.shape[0] if end is None else end))

    def to_half(self) -> torch.Tensor | None:
        """The matrix as `to_half` makes it, piece by piece."""
        return to_half(self._rows, self.shape)

    def _rows(self, begin: int, end: int) -> Rows:
        if not 0 <= begin <= end <= self.shape[0]:
            raise ValueError(f"rows {begin} to {end} are not possible: the matrix has {self.shape[0]}")
        return dequantize_rows(self.data[begin:end].numpy(), self.kind)


@cache
def block_size(kind: str) -> tuple[int, int] | None:
    """Weights and bytes of a block; None of a kind that is no block format, or none whose values can be computed."""
    try:
        weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        dequantize_rows(np.zeros((1, num_bytes), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return None
    return None if kind in FLOAT_KINDS else (weights, num_bytes)


def matrix_shape(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix whose blocks a tensor of this type and shape holds.

    Raises:
        ValueError: no such block format, or no such tensor.
    """
    size = block_size(kind)
    if size is None:
        raise ValueError(f"its blocks are said to be {kind!r}, which outpace does not read")
    if dtype is not torch.uint8 or len(shape) != 2 or min(shape) < 1 or shape[1] % size[1]:
        raise ValueError(
            f"{dtype} of shape {list(shape)} is no matrix in {kind}: that is uint8 [rows, bytes a row], in whole "
            f"blocks of {size[1]} bytes"
        )
    return shape[0], shape[1] // size[1] * size[0]


def dequantize_rows(raw: Rows, kind: str) -> Rows:
    """[R, bytes a row] uint8 -> [R, columns] float32, also of the float kinds.

    Raises:
        NotImplementedError: the values of this kind cannot be computed.
    """
    with np.errstate(all="ignore"):  # damaged scales show as values that are not finite
        return np.asarray(dequantize(raw, GGMLQuantizationType[kind]), dtype=np.float32)


def rows_are_finite(raw: Rows, kind: str) -> bool:
    """Whether all values of [R, bytes a row] uint8 are finite numbers, told from the scales where these decide."""
    offsets = _SCALES.get(kind)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    step = max(1, _CHUNK_WEIGHTS // raw.shape[1])
    for begin in range(0, len(raw), step):
        piece = raw[begin : begin + step]
        if offsets is None:
            if not np.isfinite(dequantize_rows(piece, kind)).all():
                return False
            continue
        blocks = piece.reshape(-1, size)
        for offset in offsets:
            scales = np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<u2")
            if ((scales & _EXPONENT) == _EXPONENT).any():
                return False
    return True


def to_half(read: Callable[[int, int], Rows], shape: tuple[int, int]) -> torch.Tensor | None:
    """A matrix in float16, or in bfloat16 if a value is too large for that; None if one is no finite number.

    Args:
        read: values of rows [begin, end) in float32; asked for a few rows at a time.
        shape: rows and columns.
    """
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.empty(shape, dtype=dtype, device="cpu")
        if _fill(read, values):
            return values
    return None


def _fill(read: Callable[[int, int], Rows], values: torch.Tensor) -> bool:
    """Copies values piece by piece; False as soon as one is beyond the type of `values`, or no number."""
    largest = torch.finfo(values.dtype).max
    count, width = values.shape
    step = max(1, _CHUNK_WEIGHTS // width)
    for begin in range(0, count, step):
        end = min(begin + step, count)
        rows = read(begin, end)
        # In numpy: torch would share this out over threads, which stalls for seconds where one core is busy.
        if not (rows.max() <= largest and rows.min() >= -largest):
            return False
        values[begin:end] = torch.from_numpy(rows)
    return True


def header_metadata(kinds: Mapping[str, str]) -> dict[str, str]:
    """What a safetensors header says about tensors that are blocks, by name: their kinds."""
    return {_METADATA_KEY: json.dumps(dict(kinds))} if kinds else {}


def kinds_in_metadata(metadata: object) -> dict[str, str]:
    """Kinds of the tensors that are blocks, by name, from a safetensors header's metadata.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ValueError("its metadata are no object")
    try:
        kinds = json.loads(metadata.get(_METADATA_KEY, "{}"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its list of block tensors, {_METADATA_KEY}, is no JSON: {error}") from error
    if not isinstance(kinds, dict) or not all(isinstance(kind, str) for kind in kinds.values()):
        raise ValueError(f"its list of block tensors, {_METADATA_KEY}, is no object of names and kinds")
    return kinds

"""Reading a GGUF file: metadata, where each tensor lies, and its rows as stored or in float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little-endian). The header is read
here rather than with `gguf.GGUFReader` because that one takes 13 s for a vocabulary of 152 k and cannot say which
tensor a truncated file lacks; the block formats are the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.files import describe_impostor
from outpace.models.stored import FLOAT_KINDS, block_size, dequantize_rows

__all__ = ["MAGIC", "GgufFile", "GgufTensor"]

MAGIC = b"GGUF"

# Value types of the format, by number; 8 is a string, 9 an array.
_SCALARS = ["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8"]
_STRING, _ARRAY = 8, 9
_KINDS = {int(kind): kind for kind in GGMLQuantizationType}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Args:
        name: llama.cpp's name, as `blk.0.attn_q.weight`.
        shape: outermost dimension first, as in torch (the file has them the other way round).
        kind: block format of its values.
        offset: first byte, from the beginning of the file.
        num_bytes: size in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def rows(self) -> int:
        """How many rows it has; a vector is one row."""
        return math.prod(self.shape[:-1])

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """A GGUF file, its header read and checked against its length.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is no GGUF file, is truncated, or holds a block format that cannot be read.
        UnsupportedModel: it is one part of a split model, or big-endian.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        impostor = describe_impostor(path)
        if impostor:
            raise CheckpointError(f"{path} {impostor}")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            _check_version(path, cursor)
            num_tensors, num_values = cursor.number("<u8"), cursor.number("<u8")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_values):
                key = cursor.text()
                self.metadata[key] = cursor.value(cursor.number("<u4"))
            if self.metadata.get("split.count", 0) > 1:
                raise UnsupportedModel(
                    f"{path} is one part of a split model: join the parts first (llama-gguf-split --merge)"
                )
            entries = [_read_entry(cursor) for _ in range(num_tensors)]
            alignment = int(self.metadata.get("general.alignment", 32))
            start = -(-cursor.at // alignment) * alignment
            self.tensors = {entry[0]: _place(path, start, len(data), *entry) for entry in entries}
        for tensor in {tensor.kind: tensor for tensor in self.tensors.values()}.values():
            self._check_readable(tensor)

    def read_rows(self, tensor: GgufTensor, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Values of rows [begin, end) of a tensor: [end - begin, shape[-1]] float32."""
        return dequantize_rows(self.read_bytes(tensor, begin, end), tensor.kind.name)

    def read_bytes(self, tensor: GgufTensor, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows [begin, end) of a tensor as stored: [end - begin, bytes a row] uint8."""
        width = tensor.num_bytes // tensor.rows
        raw = np.fromfile(self.path, np.uint8, (end - begin) * width, offset=tensor.offset + begin * width)
        return raw.reshape(end - begin, width)

    def _check_readable(self, tensor: GgufTensor) -> None:
        if tensor.kind.name not in FLOAT_KINDS and block_size(tensor.kind.name) is None:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} is stored as {tensor.kind.name}, which outpace does not read; "
                "take another quantisation of this model, as Q4_K_M or Q8_0"
            )


class _Cursor:
    """Reads a header value by value and notices when the file ends too soon."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.at = 0
        self._path = path
        self._data = data

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated or damaged: its header ends at byte {self.at} of {len(self._data)}: "
                "download it again"
            )
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        scalar = _SCALARS[kind] if kind < len(_SCALARS) else None
        if scalar is None:
            raise CheckpointError(f"{self._path} is damaged: value type {kind} at byte {self.at} does not exist")
        return self.number(scalar)

    def _array(self) -> list[Any]:
        kind, length = struct.unpack("<IQ", self.take(12))
        scalar = _SCALARS[kind] if kind < len(_SCALARS) else None
        if scalar is not None:
            dtype = np.dtype(scalar)
            values: list[Any] = np.frombuffer(self.take(dtype.itemsize * length), dtype).tolist()
            return values
        return [self.value(kind) for _ in range(length)]


def _check_version(path: Path, cursor: _Cursor) -> None:
    if cursor.take(4) != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with 'GGUF'")
    version = cursor.number("<u4")
    if version in (2, 3):
        return
    if version & 0xFFFF == 0:
        raise UnsupportedModel(f"{path} is a big-endian GGUF file; outpace reads little-endian ones")
    raise UnsupportedModel(f"{path} is GGUF version {version}; outpace reads versions 2 and 3")


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dimensions = cursor.number("<u4")
    shape = tuple(cursor.number("<u8") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("<u4"), cursor.number("<u8")


def _place(path: Path, start: int, size: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in _KINDS:
        raise CheckpointError(f"{path}: tensor {name!r} is of unknown type {kind}: a newer or damaged file")
    block, block_bytes = GGML_QUANT_SIZES[_KINDS[kind]]
    if not shape or min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {list(shape)}, not possible for {_KINDS[kind].name}")
    num_bytes = math.prod(shape) // block * block_bytes
    if start + offset + num_bytes > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name!r} ends at byte {start + offset + num_bytes}, the file at {size}: "
            "download it again"
        )
    return GgufTensor(name, shape, _KINDS[kind], start + offset, num_bytes)

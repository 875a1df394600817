"""Random matrices in every way that pack.c reads, with the floats that the gguf package says they are."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from outpace.models.native.matrix import PackedMatrices, Stored
from outpace.models.native.structures import Format, MatrixStruct, Source

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SOURCES = {
    "F32": Source.F32,
    "F16": Source.F16,
    "BF16": Source.BF16,
    "Q4_0": Source.Q4_0,
    "Q4_1": Source.Q4_1,
    "Q5_0": Source.Q5_0,
    "Q8_0": Source.Q8_0,
    "Q4_K": Source.Q4_K,
    "Q6_K": Source.Q6_K,
}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
SIX_BITS = ("Q5_0", "Q6_K")
FORMATS = {
    "F32": Format.F32,
    "BF16": Format.BF16,
    "F16": Format.F16,
    "Q8": Format.Q8,
    "Q4": Format.Q4,
    "Q6": Format.Q6,
}
ANY_SOURCE = tuple(name for name in FORMATS if name != "Q6")
"""Formats that every matrix can be packed to; Q6 only keeps numbers of six bits."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""First bytes of a block's float16 scales."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> Bytes:
    """[outputs, bytes a row]: every bit at random, but for the scales, which are of either sign and ordinary size."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outputs * inputs // weights, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scales = random.uniform(0.001, 0.1, len(blocks)) * random.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def make(kind: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Stored, Floats]:
    """A random matrix stored in this way, and its floats [outputs, inputs]."""
    if kind in _DTYPES:
        tensor = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(_DTYPES[kind])
        return Stored(SOURCES[kind], tensor, outputs, inputs), tensor.float().numpy()
    blocks = random_blocks(kind, outputs, inputs, seed)
    floats = np.asarray(dequantize(blocks, gguf.GGMLQuantizationType[kind]), dtype=np.float32)
    return Stored(SOURCES[kind], torch.from_numpy(blocks), outputs, inputs), floats


def make_for(format: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Stored, Floats]:
    """A matrix that can be packed to a format; for Q6 its inputs are rounded up to whole blocks."""
    return make("Q5_0", outputs, -(-inputs // 32) * 32, seed) if format == "Q6" else make("F32", outputs, inputs, seed)


def pack(stored: Stored, format: int, bias: torch.Tensor | None = None) -> MatrixStruct:
    """A matrix packed alone; the structure keeps the memory that it points to."""
    memory = PackedMatrices([(stored, format, bias)])
    (struct,) = memory.structs
    struct.owner = memory
    return struct

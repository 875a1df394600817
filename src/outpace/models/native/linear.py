"""A single linear layer on the native kernels, for models whose layers are not written there."""

from __future__ import annotations

import ctypes

import torch

from outpace.models.native.library import library
from outpace.models.native.matrix import GROUP, PackedMatrices, Stored, bits_of, source_of
from outpace.models.native.pointers import address_of
from outpace.models.native.structures import Format, InputsStruct

__all__ = ["NativeLinear"]

_FORMATS = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}


class NativeLinear:
    """y = x W^T over weights packed as they are stored, or in 8 bits; a row has the same bits beside any others.

    Args:
        weight: [out, in], float32, float16 or bfloat16; copied.
        int8: 8-bit weights with 16-bit activations instead of floats.

    Raises:
        OutOfMemory: the system has no memory.
        UnsupportedModel: a matrix too large for 32-bit sizes.
    """

    def __init__(self, weight: torch.Tensor, *, int8: bool = False) -> None:
        outputs, inputs = weight.shape
        stored = Stored(source_of(None, weight.dtype), weight.detach().contiguous(), outputs, inputs)
        self._int8 = int8
        self._format = Format.Q8 if int8 else _FORMATS[weight.dtype]
        self._matrices = PackedMatrices([(stored, self._format, None)])
        self._matrix = self._matrices.structs[0]
        self.weight_bytes = self._matrices.weight_bytes

    def describe(self) -> str:
        """Precision in a few words, for people."""
        return bits_of(self._format)

    def __call__(self, rows: torch.Tensor, threads: int) -> torch.Tensor:
        """[R, in] float32 -> [R, out] float32, on up to `threads` threads, which change no bit.

        Raises:
            ValueError: `rows` is of another type or width.
        """
        count, width, padded = len(rows), self._matrix.inputs, self._matrix.padded
        if padded != width:
            rows = torch.nn.functional.pad(rows, (0, padded - width))  # another width shows below
        rows = rows.contiguous()
        groups = padded // GROUP
        values = address_of(rows, torch.float32, (count, padded))
        inputs = InputsStruct(count=count, padded=padded, groups=groups, values=values)
        if self._int8:
            words = torch.empty(count, padded, dtype=torch.int16, device="cpu")
            scales = torch.empty(count, groups, dtype=torch.float32, device="cpu")
            inputs.words, inputs.word_scale = address_of(words, torch.int16), address_of(scales, torch.float32)
        result = torch.empty(count, self._matrix.outputs, dtype=torch.float32, device="cpu")
        if count:
            target = ctypes.c_void_p(address_of(result, torch.float32))
            library().run_linear(ctypes.byref(self._matrix), ctypes.byref(inputs), target, threads)
        return result

"""A linear layer that stands alone, in front of a head's decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outpace.models.linear import pack_linear
from outpace.models.native.linear import NativeLinear
from outpace.models.precision import Precision

__all__ = ["HeadLinear"]


class HeadLinear:
    """rows @ weight.T + bias, on the kernels that a precision names.

    Args:
        weight: [outputs, inputs], any float type; a packed copy is kept.
        precision: of the head. Four bits are eight here, for there is no kernel for a single layer in four.
        bias: [outputs], any float type.
    """

    def __init__(self, weight: torch.Tensor, precision: Precision, bias: torch.Tensor | None = None) -> None:
        self._bias = None if bias is None else bias.float()
        self._product: Callable[[torch.Tensor], torch.Tensor]
        if precision.kernels == "native":
            dtype = getattr(torch, precision.dtype) if precision.dtype != "auto" else None
            weight = weight.to(dtype or (torch.float32 if weight.dtype is torch.float64 else weight.dtype))
            linear = NativeLinear(weight, int8=precision.quantization in ("int8", "int4"))
            self._product = lambda rows: linear(rows, torch.get_num_threads())
            self.weight_bytes = linear.weight_bytes
        else:
            packed = pack_linear(weight, None, precision.quantization)
            self._product = packed
            self.weight_bytes = packed.weight_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, inputs] float32 -> [R, outputs] float32."""
        result = self._product(rows.contiguous())
        return result if self._bias is None else result + self._bias

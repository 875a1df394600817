"""Linear layers packed once for this processor, in kernels whose rows do not depend on each other.

A row of the result has the same bits whether it is computed alone or among others, with any number of threads: in
int8 because the products are summed in integers and each row is scaled by its own largest value, in fp32 because
oneDNN's kernel for weights packed with a hint of 8 rows sums every row in the same order at every row count. (A plain
matrix product does not: its library picks the order by the number of rows.) `pack_linear` chooses; the classes are
the same to their callers. Measured per 100 M weights on two AVX2 cores, 1 and 8 rows: int8 4.7 and 7.9 ms, fp32
18 and 30 ms, plain 26 and 99 ms.
"""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Protocol

import torch
import torch.nn.functional as F

from outpace.errors import InvalidParameter, UnsupportedModel

__all__ = [
    "Int8Linear",
    "Linear",
    "PlainLinear",
    "PrepackedLinear",
    "describe_precision",
    "has_int8",
    "pack_linear",
]

_LOG = logging.getLogger(__name__)

_WEIGHT_LEVELS = 63
"""7-bit weights: pairs of 8-bit products would overflow the kernel's 16-bit sums, 2 * 255 * 63 does not."""

_ROW_LEVELS = 127
_ROW_ZERO = 128
_ROW_HINT = 8
_PACKING_ROWS = 64  # output rows quantised at a time: few enough that their fp32 copy stays in the processor's cache


class Linear(Protocol):
    """y = x W^T + b over packed weights."""

    @property
    def weight_bytes(self) -> int:
        """Memory the packed weights hold, in bytes."""
        ...

    def describe(self) -> str:
        """Precision and kernel in a few words, for people."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, in] float32 -> [R, out] float32."""
        ...

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """residual [R, out] plus the result for rows [R, in], in one pass where the kernel can."""
        ...


class Int8Linear:
    """7-bit weights, a scale per output; 8-bit activations, a scale per row; integer sums (fbgemm).

    Args:
        weight: [out, in], any float type; not kept.
        bias: [out] or None, added in float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        outputs, inputs = weight.shape
        self._packed = _pack_int8(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        # One byte a weight; beside it scale, zero point and column sum of each output.
        self.weight_bytes = outputs * inputs + 12 * outputs + _nbytes(self._bias)

    def describe(self) -> str:
        return "int8 rows (7-bit weights, 8-bit activations)"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product, scale = self._product(rows)
        return product.mul_(scale) if self._bias is None else torch.addcmul(self._bias, product, scale)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        product, scale = self._product(rows)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addcmul(residual, product, scale)

    def _product(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A row of zeros becomes 0/0, which the kernel rounds to some integer; its scale of 0 makes the result 0.
        scale = rows.abs().amax(-1, keepdim=True)
        product: torch.Tensor = _int8_product(rows / scale, 1 / _ROW_LEVELS, _ROW_ZERO, self._packed)
        return product, scale


class PrepackedLinear:
    """fp32 weights in oneDNN's own blocked order.

    Args:
        weight: [out, in], any float type; not kept.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), _ROW_HINT)
        self._bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = 4 * weight.numel() + _nbytes(self._bias)

    def describe(self) -> str:
        return "fp32 prepacked (oneDNN)"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._packed, self._bias, "none", [], ""
        )
        return result

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(residual)


class PlainLinear:
    """fp32 weights as they are, one row at a time: for processors without the kernels above.

    Args:
        weight: [out, in], any float type.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.float().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = _nbytes(self._weight) + _nbytes(self._bias)

    def describe(self) -> str:
        return "fp32 plain, one row at a time"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(len(rows), len(self._weight))
        for row in range(len(rows)):
            result[row] = F.linear(rows[row : row + 1], self._weight, self._bias)[0]
        return result

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(residual)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, quantization: str) -> Linear:
    """Packs a layer for this processor; the originals are free to go afterwards.

    Args:
        weight: [out, in], any float type.
        bias: [out] or None.
        quantization: "int8", or "none" for fp32.

    Raises:
        InvalidParameter: another quantization, or int8 on a processor without its kernel.
        UnsupportedModel: a layer too large for the kernels' 32-bit sizes.
    """
    if weight.numel() >= 2**31:
        raise UnsupportedModel(
            f"a linear layer of {tuple(weight.shape)} has {weight.numel():.2e} weights; the kernels take less than 2^31"
        )
    if quantization == "int8":
        if not has_int8():
            raise InvalidParameter(
                "quantization='int8' is not possible on this processor (no fbgemm kernel); use quantization='none'"
            )
        return Int8Linear(weight, bias)
    if quantization == "none":
        return PrepackedLinear(weight, bias) if _has_prepacked() else PlainLinear(weight, bias)
    raise InvalidParameter(f"quantization={quantization!r} is not possible for a linear layer; possible: int8, none")


def describe_precision(quantization: str) -> str:
    """What `describe` of every layer will say, before any is loaded."""
    return pack_linear(torch.eye(16, dtype=torch.float32, device="cpu"), None, quantization).describe()


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _pack_int8(weight: torch.Tensor) -> torch.ScriptObject:
    outputs, inputs = weight.shape
    integers = torch.empty(outputs, inputs, dtype=torch.int8, device="cpu")
    scales = torch.empty(outputs, dtype=torch.float64, device="cpu")
    for start in range(0, outputs, _PACKING_ROWS):
        part = slice(start, start + _PACKING_ROWS)
        block = weight[part].float()
        # An all-zero output keeps scale 1, so that nothing divides by zero; NaN makes the scale NaN and stays visible.
        largest = block.abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / _WEIGHT_LEVELS)
        integers[part] = block.div(scale).round_()
        scales[part] = scale[:, 0]
    zeros = torch.zeros(outputs, dtype=torch.long, device="cpu")
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # Torch announces the removal of tensors with quantized types; only this line makes one.
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            quantized = torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed


_int8_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


@functools.cache
def has_int8() -> bool:
    """Whether this processor and build of torch have the int8 kernel."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@functools.cache
def _has_prepacked() -> bool:
    try:
        weight = torch.eye(16, dtype=torch.float32, device="cpu")
        PrepackedLinear(weight, None)(weight[:1])
    except (RuntimeError, AttributeError) as error:
        _LOG.warning("oneDNN's prepacked fp32 linear layer does not run here (%s); rows go one at a time", error)
        return False
    return True

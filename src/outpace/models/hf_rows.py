"""Products of somebody else's modules, computed so that a row has the same bits beside any other rows.

A model of transformers multiplies by its weights through a few functions of torch. While `RowProducts` is entered they
are taken over, in this thread only and without touching a module: what is multiplied by a weight of the model goes
through a packed copy of it whose kernel sums each row in the same order at every row count, or, where there is no copy,
one row at a time. Functions that bend their argument (silu, tanh, ...) get whole vectors: torch computes the remainder
of a vector differently, and where that falls depends on the number of rows.

What is not taken over (products of two activations, einsum, kernels of other packages) is left as it is; the probe of
rows at start-up finds out whether that keeps the bits.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from outpace.errors import InvalidParameter
from outpace.models.linear import Linear, PlainLinear, pack_linear
from outpace.models.native.linear import NativeLinear
from outpace.models.precision import Precision

__all__ = ["RowProducts", "can_pack", "require_possible"]

_VECTOR = 32
"""Numbers that torch's elementwise kernels take at a time, at most."""
_WHOLE, _SAMPLED = 1 << 16, 97
"""Words of 8 bytes up to which a weight is checked whole, and every how many of more: a prime, to meet all columns."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CURVES = frozenset(
    {
        *(F.silu, F.gelu, F.softplus, F.elu, F.mish, F.tanh, F.sigmoid, F.logsigmoid),
        *(torch.tanh, torch.sigmoid, torch.exp, torch.erf, torch.cos, torch.sin, torch.log, torch.expm1, torch.log1p),
        *(torch.Tensor.tanh, torch.Tensor.sigmoid, torch.Tensor.exp, torch.Tensor.erf),
        *(torch.Tensor.cos, torch.Tensor.sin, torch.Tensor.log, torch.Tensor.expm1, torch.Tensor.log1p),
    }
)


def require_possible(precision: Precision) -> None:
    """Raises InvalidParameter for weights in a precision that products here are not computed in."""
    if precision.quantization not in ("none", "int8"):
        raise InvalidParameter(
            f"quantization={precision.quantization!r} is not possible on transformers' layers; possible: none, int8"
        )


def can_pack(precision: Precision, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for packed copies of weights of this type."""
    if precision.kernels == "native":
        return dtype in _FLOATS
    if precision.quantization == "int8":
        return dtype in _FLOATS
    # A copy of half precision would be one of twice its size; a plain one would be computed no faster.
    return dtype == torch.float32 and not isinstance(
        pack_linear(torch.eye(16, dtype=torch.float32, device="cpu"), None, "none"), PlainLinear
    )


@dataclass(slots=True)
class _Packed:
    """A packed weight; `weight` is kept so that its address stays its own, `fingerprint` tells if its numbers are."""

    weight: torch.Tensor
    version: int
    fingerprint: tuple[int, int]
    linear: NativeLinear | Linear


class RowProducts(TorchFunctionMode):
    """Takes over a model's products while it is entered.

    Args:
        model: whose parameters are weights.
        precision: of packed copies: int8, or none for the type of the weights.
        pack: make packed copies; else a product goes one row at a time.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision, *, pack: bool) -> None:
        super().__init__()
        self._precision = precision
        self._model = model
        self._dtypes = {
            dtype for dtype in {weight.dtype for weight in model.parameters()} if pack and can_pack(precision, dtype)
        }
        self._packed: dict[tuple[Any, ...], _Packed] = {}
        self._storages: set[int] = set()
        self._threads = 1

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed copies made so far, in bytes."""
        return sum(packed.linear.weight_bytes for packed in self._packed.values())

    def describe(self) -> str:
        """How products are computed, for people."""
        kinds = sorted({packed.linear.describe() for packed in self._packed.values()})
        return " and ".join(kinds) or "weights as loaded, one row at a time"

    def check_copies(self) -> None:
        """Drops packed copies of weights that are gone, or that hold other numbers now, however they were changed.

        Reads every weight once, about the time of a token.
        """
        self._storages = {weight.untyped_storage().data_ptr() for weight in self._model.parameters()}
        self._packed = {
            key: packed
            for key, packed in self._packed.items()
            if self._is_weight(packed.weight) and _fingerprint(packed.weight) == packed.fingerprint
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Takes products over with the threads in use; everything around them runs on one.

        The parts into which torch cuts an elementwise function for its threads end in the middle of rows.
        """
        self._threads = torch.get_num_threads()
        if next(self._model.parameters()).untyped_storage().data_ptr() not in self._storages:
            self._storages = {weight.untyped_storage().data_ptr() for weight in self._model.parameters()}
        torch.set_num_threads(1)
        try:
            with self:
                yield
        finally:
            torch.set_num_threads(self._threads)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside of `running`: torch as it is, on all the threads."""
        torch.set_num_threads(self._threads)
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            torch.set_num_threads(1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in (torch.addmm, torch.Tensor.addmm) and len(args) == 3 and not kwargs and self._is_weight(args[2]):
            return self._times(args[1], args[2].t(), args[0])
        if func in _MATMULS and len(args) == 2 and not kwargs and self._is_weight(args[1]):
            return self._times(args[0], args[1].t(), None)
        if func in _CURVES and args and isinstance(args[0], torch.Tensor):
            return _whole_vectors(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.dim() != 2 or input.dim() < 2:
            return F.linear(input, weight, bias)
        return self._times(input, weight, bias)

    def _is_weight(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.dim() == 2
            and tensor.untyped_storage().data_ptr() in self._storages
        )

    def _times(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in] times a weight [out, in] transposed, plus a bias [out]: [..., out] in the input's type."""
        rows = input.reshape(-1, input.shape[-1])
        packed = self._find(weight)
        if packed is not None:
            values = rows.float()
            linear = packed.linear
            result = linear(values, self._threads) if isinstance(linear, NativeLinear) else self._spread(linear, values)
            if bias is not None:
                result.add_(bias)
            result = result.to(input.dtype)
        elif len(rows) > 1:
            result = self._spread(_row_by_row, rows, weight, bias)
        else:
            result = self._spread(F.linear, rows, weight, bias)
        return result.view(*input.shape[:-1], len(weight))

    def _spread(self, product: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """A product of torch's, on all the threads."""
        torch.set_num_threads(self._threads)
        try:
            return product(*args)
        finally:
            torch.set_num_threads(1)

    def _find(self, weight: torch.Tensor) -> _Packed | None:
        """The packed copy of a weight as it is now; None if there is to be none."""
        key = (weight.data_ptr(), *weight.shape, *weight.stride(), weight.dtype)
        packed = self._packed.get(key)
        version = 0 if weight.is_inference() else weight._version
        if packed is not None and packed.version == version:
            return packed
        if weight.dtype not in self._dtypes or not self._is_weight(weight):
            return None
        self._packed.pop(key, None)
        int8 = self._precision.quantization == "int8"
        if self._precision.kernels == "native":
            linear: NativeLinear | Linear = NativeLinear(weight, int8=int8)
        else:
            linear = pack_linear(weight.detach(), None, self._precision.quantization)
        self._packed[key] = found = _Packed(weight.detach(), version, _fingerprint(weight), linear)
        return found


def _fingerprint(weight: torch.Tensor) -> tuple[int, int]:
    """What changes with the weight's bits: their sum as integers, at the speed of memory, and a checksum of some.

    The sum sees that one number changed, the checksum sees numbers that changed places or signs all over.
    """
    with torch._C.DisableTorchFunction():
        bits = weight.detach().contiguous().view(-1).view(torch.uint8).numpy()
    whole = bits.size // 8 * 8
    words = bits[:whole].view(np.uint64)
    total = int(np.add.reduce(words)) + int(bits[whole:].sum())
    return total, zlib.crc32(words[:: _SAMPLED if words.size > _WHOLE else 1].tobytes())


_MATMULS = frozenset({torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__})


def _row_by_row(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([F.linear(row, weight, bias) for row in torch.split(rows, 1)])


def _whole_vectors(
    func: Callable[..., Any], values: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An elementwise function over rows that are padded to whole vectors."""
    width = values.shape[-1] if values.dim() else 0
    if width == 0 or not values.is_floating_point() or (width % _VECTOR == 0 and values.stride(-1) == 1):
        return func(values, *args, **kwargs)
    padded = F.pad(values, (0, -width % _VECTOR)).contiguous()
    return func(padded, *args, **kwargs)[..., :width]

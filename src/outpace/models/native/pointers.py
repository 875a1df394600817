"""The only way from a tensor to C, which believes whatever it is told about the numbers behind an address."""

from __future__ import annotations

import torch

__all__ = ["address_of"]


def address_of(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> int:
    """Where the numbers of a tensor lie; 0 if it has none. Whoever takes the address keeps the tensor.

    Args:
        tensor: on the CPU, its numbers in row order without a gap.
        dtype: the type C takes them for.
        shape: what C takes for granted; None where it is told the size.

    Raises:
        ValueError: the tensor is another. Memory would be damaged if C wrote to it, or read behind its end.
    """
    fits = tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()
    if not fits or (shape is not None and tensor.shape != shape):
        order = "" if tensor.is_contiguous() else ", with gaps or in another order"
        wanted = "" if shape is None else f" of shape {list(shape)}"
        raise ValueError(
            f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}{order} is not possible: the kernels take "
            f"{dtype}{wanted} on cpu in row order"
        )
    return tensor.data_ptr()

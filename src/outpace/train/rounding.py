"""Weights as they will be stored: in fewer bits than they are trained in, and measured so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["SAVED_AS", "rounded", "stored_weights"]

SAVED_AS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
@torch.no_grad()
def rounded(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it, the module's weights are what a file of this type gives back; behind it, what they were, to the bit.

    Args:
        module: in float32.
        dtype: of the file.
    """
    weights = list(module.parameters())
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.copy_(weight.to(dtype))
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


def stored_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """{name: tensor} of a module, as a file takes them: contiguous, of this type."""
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in module.state_dict().items()}

"""Where a model's tensors come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from outpace.models.stored import QuantizedBlocks

__all__ = ["WeightSource"]


class WeightSource(Protocol):
    """Named tensors of a checkpoint, in transformers' names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is, without reading it."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """One tensor, in the float type it is stored in. KeyError if there is none of that name."""
        ...

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """The same tensor as quantised blocks, or None if it is stored as floats. KeyError as above."""
        ...

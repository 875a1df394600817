"""How fast this machine reads memory: what bounds decoding on a CPU, whoever does it."""

from __future__ import annotations

import time

import torch

__all__ = ["read_bytes_per_second"]

_BYTES = 256 << 20
"""Well beyond any cache."""


def read_bytes_per_second(repeats: int = 5) -> float:
    """Best of some passes over a block of memory, with the threads torch uses now."""
    block = torch.ones(_BYTES // 4, dtype=torch.float32, device="cpu")
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - began)
    return _BYTES / best

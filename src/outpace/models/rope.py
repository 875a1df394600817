"""Rotary position embedding, as one complex product.

The checkpoint rotates dimension i of a head with dimension i + D/2. Here the rows of the query and key projections
are reordered once, at load, so that such a pair stands side by side (`interleaved`); a head is then D/2 complex
numbers, and turning it is one multiplication. Query-key products do not change, since both are reordered alike.
"""

from __future__ import annotations

import math

import torch

from outpace.models.config import RopeConfig

__all__ = ["RopeTable", "interleaved", "inverse_frequencies"]

_BLOCK = 256
"""Positions computed at a time: a fixed shape, so that an angle's bits do not depend on how far the table grew."""


def interleaved(head_rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Moves rotary partners (i, i + D/2) side by side (2i, 2i + 1) within each head.

    Args:
        head_rows: [heads * D, ...], a projection's weight or bias, or a head norm's weight.
        head_dim: D.
    """
    heads = head_rows.reshape(-1, 2, head_dim // 2, *head_rows.shape[1:])
    return heads.transpose(1, 2).reshape(head_rows.shape)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each rotary pair, and the factor on cos and sin.

    Formulas: rotary (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), Llama 3.1's own.

    Returns:
        ([D/2] float32, attention factor)
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies: torch.Tensor = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # over the first context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    def pair_with(turns: float) -> float:
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RopeTable:
    """The complex factor of every (position, pair), computed as positions are first asked for.

    Args:
        rope: frequencies.
        head_dim: D, even.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._table = torch.empty(0, head_dim // 2, dtype=torch.complex64, device="cpu")

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Factors of these positions.

        Args:
            positions: [R] int64.

        Returns:
            [R, 1, D/2] complex64, to be multiplied with [R, heads, D/2].
        """
        highest = int(positions.max())
        if highest >= len(self._table):
            self._grow(max(highest + 1, 2 * len(self._table)))
        return self._table.index_select(0, positions).unsqueeze(1)

    def _grow(self, length: int) -> None:
        blocks = [self._table]
        for start in range(len(self._table), length, _BLOCK):
            angles = torch.arange(start, start + _BLOCK, dtype=torch.float32, device="cpu")[:, None] * self._frequencies
            blocks.append(torch.complex(angles.cos() * self._scale, angles.sin() * self._scale))
        self._table = torch.cat(blocks)

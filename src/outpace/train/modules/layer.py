"""One decoder layer of the Llama shape, trainable: what `models.blocks` and the native kernels compute, in plain torch.

Parameters have the names of transformers' checkpoints, so that a layer's tensors are saved as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from outpace.models.config import DecoderConfig, RopeConfig
from outpace.models.rope import inverse_frequencies

__all__ = ["Attention", "DecoderLayer", "Mlp", "RmsNorm", "Rotary", "seen"]


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32, device="cpu"))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self._eps) * self.weight


class Rotary:
    """Cosines and sines of rotary positions.

    Args:
        rope: frequencies.
        head_dim: D.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._frequencies, self._scale = inverse_frequencies(rope, head_dim)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, W] int64 -> cosines and sines [B, 1, W, D], the second half repeating the first."""
        angles = positions.unsqueeze(-1).float() * self._frequencies
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return angles.cos() * self._scale, angles.sin() * self._scale

    def of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] int64 -> the same [1, n, D]."""
        cosines, sines = self.at(positions.unsqueeze(0))
        return cosines[0], sines[0]


def seen(pieces: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Which rows a row sees: itself and those before it in its own piece.

    Args:
        pieces: [B, W] number of each token's piece.
        window: how many of the last rows, its own included; None for all.

    Returns:
        [B, 1, W, W] bool, query rows first.
    """
    places = torch.arange(pieces.shape[1], dtype=torch.int64, device="cpu")
    distance = places.unsqueeze(1) - places
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    same = pieces.unsqueeze(2) == pieces.unsqueeze(1)
    return (same & near).unsqueeze(1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        config: the target's shape.
        inputs: width of the rows; None is the target's.
    """

    def __init__(self, config: DecoderConfig, inputs: int | None = None) -> None:
        super().__init__()
        width = inputs or config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._head_dim = config.head_dim
        self._groups = config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias, dtype=torch.float32, device="cpu")
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias, dtype=torch.float32, device="cpu")
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias, dtype=torch.float32, device="cpu")
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias, dtype=torch.float32, device="cpu")
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, rows: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[..., n, inputs] -> turned queries [..., heads, n, D]."""
        query = self._split(self.q_proj(rows))
        return _turned(query if self.q_norm is None else self.q_norm(query), turn)

    def keys(self, rows: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n, inputs] -> turned keys, and values, [..., key heads, n, D]."""
        key = self._split(self.k_proj(rows))
        return _turned(key if self.k_norm is None else self.k_norm(key), turn), self._split(self.v_proj(rows))

    def join(self, mixed: torch.Tensor) -> torch.Tensor:
        """[..., heads, n, D] -> [..., n, H]."""
        joined: torch.Tensor = self.o_proj(mixed.transpose(-3, -2).flatten(-2))
        return joined

    def forward(self, rows: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        query, (key, value) = self.queries(rows, turn), self.keys(rows, turn)
        key, value = (item.repeat_interleave(self._groups, -3) for item in (key, value))
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    def _split(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*rows.shape[:-1], rows.shape[-1] // self._head_dim, self._head_dim).transpose(-3, -2)


def _turned(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[..., n, D] with dimension i turned against i + D/2, as checkpoints mean it."""
    low, high = heads.chunk(2, -1)
    return heads * turn[0] + torch.cat((-high, low), -1) * turn[1]


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=config.mlp_bias, dtype=torch.float32, device="cpu")
        self.up_proj = nn.Linear(hidden, wide, bias=config.mlp_bias, dtype=torch.float32, device="cpu")
        self.down_proj = nn.Linear(wide, hidden, bias=config.mlp_bias, dtype=torch.float32, device="cpu")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return result


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised copy of the stream and added back to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """[B, W, H] -> the same, over the rows that `mask` [B, 1, W, W] shows."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn, mask)
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result

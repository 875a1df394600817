"""A whole small model, trainable, with tensors named as transformers names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outpace.models.config import DecoderConfig
from outpace.train.modules.layer import DecoderLayer, RmsNorm, Rotary, seen

__all__ = ["SmallModel"]


class _Body(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rows, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(rows, hidden, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(hidden, config.rms_norm_eps)


class SmallModel(nn.Module):
    """Embedding, layers, norm and output head.

    Args:
        config: its shape.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = _Body(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.float32, device="cpu")
        )
        self._windows: Sequence[int | None] = config.windows
        self._rotary = Rotary(config.rope, config.head_dim)

    @property
    def head(self) -> torch.Tensor:
        """[rows, H] the output head, padded ids included."""
        weight: torch.Tensor = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        return weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
        """[B, W] tokens, places and pieces -> [B, W, H] states for the output head."""
        turn = self._rotary.at(positions)
        masks = {window: seen(pieces, window) for window in set(self._windows)}
        hidden = self.model.embed_tokens(ids)
        for layer, window in zip(self.model.layers, self._windows, strict=True):
            hidden = layer(hidden, turn, masks[window])
        result: torch.Tensor = self.model.norm(hidden)
        return result

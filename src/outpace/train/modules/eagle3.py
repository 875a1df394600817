"""An EAGLE-3 head, trainable: the tensors of `models.eagle3_config`, unrolled as it will be used (arXiv 2503.01840).

While serving, the head reads true features of committed positions and, behind them, what it put out itself. Training
does the same from every row at once ("training-time test"). At step j, row t has the embedding of token t + 1 + j, the
feature made from the target's states at t (j = 0) or the head's own output of the step before, and sees

    the true rows 0..t of its piece (keys of step 0), and its own rows of steps 1..j

which are exactly the cache rows a chain drafted behind token t + 1 has. It then guesses token t + 2 + j.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from outpace.models.config import DecoderConfig
from outpace.train.modules.layer import Attention, Mlp, RmsNorm, Rotary, seen

__all__ = ["Eagle3Head", "Unrolling"]

_Heads = tuple[torch.Tensor, torch.Tensor]


class _Layer(nn.Module):
    """The one decoder layer; its names are those of the file format."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)


class Eagle3Head(nn.Module):
    """The head.

    Args:
        config: shape of its layer.
        target_hidden_size: width of the target's states.
        draft_vocab_size: rows of an output head of its own; None if the target's is shared.
    """

    def __init__(self, config: DecoderConfig, target_hidden_size: int, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self._rotary = Rotary(config.rope, config.head_dim)
        self._scale = config.head_dim**-0.5
        self.fc = nn.Linear(3 * target_hidden_size, hidden, bias=False, dtype=torch.float32, device="cpu")
        self.midlayer = _Layer(config)
        self.norm = RmsNorm(hidden, config.rms_norm_eps)
        self.lm_head = (
            None
            if draft_vocab_size is None
            else nn.Linear(hidden, draft_vocab_size, bias=False, dtype=torch.float32, device="cpu")
        )

    def begin(self, aux: torch.Tensor, positions: torch.Tensor, pieces: torch.Tensor) -> Unrolling:
        """Starts unrolling.

        Args:
            aux: [B, W, 3 * Ht] the target's states, low, middle and high side by side.
            positions: [B, W] places of the tokens in their pieces.
            pieces: [B, W] number of each token's piece.
        """
        return Unrolling(self, self.fc(aux), positions, seen(pieces))

    def mix(self, query: torch.Tensor, keys: list[_Heads], mask: torch.Tensor) -> torch.Tensor:
        """Attention of each row over the true rows it sees, and its own rows of later steps.

        Args:
            query: [B, heads, W, D].
            keys: keys and values [B, heads, W, D] of step 0 and, one row for a row, of the steps after it.
            mask: [B, 1, W, W] bool, which rows of step 0 are seen.
        """
        (key, value), *own = keys
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        parts = [scores, *((query * later).sum(-1, keepdim=True) for later, _ in own)]
        shares = (torch.cat(parts, -1) * self._scale).softmax(-1)
        width = key.shape[-2]
        mixed: torch.Tensor = shares[..., :width] @ value
        for number, (_, later) in enumerate(own):
            mixed = mixed + shares[..., width + number : width + number + 1] * later
        return mixed

    def turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary factors of positions."""
        return self._rotary.at(positions)


class Unrolling:
    """A head on its way from step to step.

    Args:
        head: the head.
        feature: [B, W, H] made from the target's states.
        positions: [B, W].
        mask: [B, 1, W, W] bool.
    """

    def __init__(self, head: Eagle3Head, feature: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> None:
        self._head, self._feature, self._positions, self._mask = head, feature, positions, mask
        self._keys: list[_Heads] = []

    def step(self, embedded: torch.Tensor) -> torch.Tensor:
        """One step further.

        Args:
            embedded: [B, W, H] embeddings of the tokens t + 1 + j.

        Returns:
            [B, W, H] states behind the last norm, for the output head.
        """
        head, layer, residual = self._head, self._head.midlayer, self._feature
        rows = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(residual)), -1)
        turn = head.turn(self._positions + len(self._keys))
        query, key, value = layer.self_attn.heads(rows, turn)
        self._keys.append((key, value))
        if len(self._keys) == 1:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask)
        else:
            mixed = head.mix(query, self._keys, self._mask)
        residual = residual + layer.self_attn.join(mixed)
        self._feature = residual + layer.mlp(layer.post_attention_layernorm(residual))
        result: torch.Tensor = head.norm(self._feature)
        return result

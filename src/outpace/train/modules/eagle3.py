"""An EAGLE-3 head, trainable: the tensors of `models.eagle3_config`, unrolled as it will be used (arXiv 2503.01840).

While serving, the head reads true features of committed positions and, behind them, what it put out itself. Training
does the same from many rows at once ("training-time test"). At step j, row t has the embedding of token t + 1 + j, the
feature made from the target's states at t (j = 0) or the head's own output of the step before, and sees

    the true rows 0..t of its piece (keys of step 0), and its own rows of steps 1..j

which are exactly the cache rows a chain drafted behind token t + 1 has. It then guesses token t + 2 + j.

Every row needs keys of step 0; queries, MLP and output head are computed only for rows that guess something.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outpace.models.config import DecoderConfig
from outpace.train.modules.layer import Attention, Mlp, RmsNorm, Rotary

__all__ = ["Eagle3Head", "Unrolling"]


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
        self.fc = nn.Linear(3 * target_hidden_size, hidden, bias=False, dtype=torch.float32, device="cpu")
        self.midlayer = _Layer(config)
        self.norm = RmsNorm(hidden, config.rms_norm_eps)
        self.lm_head = (
            None
            if draft_vocab_size is None
            else nn.Linear(hidden, draft_vocab_size, bias=False, dtype=torch.float32, device="cpu")
        )

    def begin(
        self, aux: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, pieces: Sequence[tuple[int, int]]
    ) -> Unrolling:
        """Starts unrolling.

        Args:
            aux: [S, 3 * Ht] the target's states of all slots, low, middle and high side by side.
            embedded: [S, H] embedding of the token behind each.
            positions: [S] places of the tokens in their pieces.
            pieces: (begin, end) slots of each piece, ascending.
        """
        return Unrolling(self, self.fc(aux), embedded, positions, pieces)

    def turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] positions -> rotary factors [1, n, D]."""
        return self._rotary.of(positions)


class Unrolling:
    """A head on its way from step to step.

    Args:
        head: the head.
        feature: [S, H] made from the target's states.
        embedded: [S, H] embedding of the token behind each slot.
        positions: [S].
        pieces: (begin, end) slots of each piece, ascending.
    """

    def __init__(
        self,
        head: Eagle3Head,
        feature: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        self._head, self._feature, self._positions, self._pieces = head, feature, positions, pieces
        self._input = self._joined(embedded, feature)
        self._key, self._value = head.midlayer.self_attn.keys(self._input, head.turn(positions))
        self._rows: torch.Tensor | None = None
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values of steps 1.., [heads, n, D] of the rows that are left."""

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        """Step 0.

        Args:
            rows: [n] int64 slots that guess something, ascending.

        Returns:
            [n, H] states behind the last norm, for the output head.
        """
        self._rows = rows
        return self._finish(self._input[rows], self._feature[rows], self._turn(0))

    def further(self, embedded: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Step j, the j-th call.

        Args:
            embedded: [n, H] embedding of token t + 1 + j for each of the rows t.
            rows: [n] int64 slots, ascending; all of them were in the step before.

        Returns:
            As `first`.
        """
        assert self._rows is not None
        still = torch.searchsorted(self._rows, rows)
        residual = self._feature[still]
        self._own = [(key[:, still], value[:, still]) for key, value in self._own]
        self._rows = rows
        inputs = self._joined(embedded, residual)
        turn = self._turn(len(self._own) + 1)
        self._own.append(self._head.midlayer.self_attn.keys(inputs, turn))
        return self._finish(inputs, residual, turn)

    def _joined(self, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        layer = self._head.midlayer
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)

    def _turn(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._rows is not None
        return self._head.turn(self._positions[self._rows] + step)

    def _finish(
        self, inputs: torch.Tensor, residual: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        layer = self._head.midlayer
        query = layer.self_attn.queries(inputs, turn)
        residual = residual + layer.self_attn.join(self._mix(query))
        self._feature = residual + layer.mlp(layer.post_attention_layernorm(residual))
        result: torch.Tensor = self._head.norm(self._feature)
        return result

    def _mix(self, query: torch.Tensor) -> torch.Tensor:
        """[heads, n, D] -> the same: each row over the true rows it sees and its own rows of later steps."""
        assert self._rows is not None
        query = query * query.shape[-1] ** -0.5
        begins = [*(begin for begin, _ in self._pieces), self._pieces[-1][1]]
        edges = torch.searchsorted(self._rows, torch.tensor(begins, dtype=torch.int64, device="cpu"))
        mixed = []
        for (begin, end), low, high in zip(self._pieces, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if low < high:
                mixed.append(self._mix_piece(query[:, low:high], begin, end, slice(low, high)))
        return torch.cat(mixed, 1) if mixed else query

    def _mix_piece(self, query: torch.Tensor, begin: int, end: int, part: slice) -> torch.Tensor:
        """Rows of one piece. Query heads that share keys stand side by side, as rows of one product."""
        assert self._rows is not None
        key, value = self._key[:, begin:end], self._value[:, begin:end]
        groups, width = len(key), end - begin
        grouped = query.reshape(groups, -1, *query.shape[1:])  # [groups, heads each, n, D]
        later = torch.arange(begin, end, dtype=torch.int64, device="cpu") > self._rows[part].unsqueeze(1)
        scores = (grouped.flatten(1, 2) @ key.transpose(-1, -2)).view(*grouped.shape[:-1], width)
        parts = [scores.masked_fill(later, -torch.inf)]
        own = [(keys[:, part].unsqueeze(1), values[:, part].unsqueeze(1)) for keys, values in self._own]
        parts += [(grouped * keys).sum(-1, keepdim=True) for keys, _ in own]
        shares = (torch.cat(parts, -1) if own else parts[0]).softmax(-1)
        mixed = (shares[..., :width].flatten(1, 2) @ value).view_as(grouped)
        for number, (_, values) in enumerate(own, width):
            mixed = mixed + shares[..., number : number + 1] * values
        return mixed.flatten(0, 1)

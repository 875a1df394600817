"""The target's distribution of the rows of a batch, as `losses.Teacher`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outpace.train.losses import Teacher
from outpace.train.target import Batch

__all__ = ["PartOfHead", "SubsetTeacher", "WholeTeacher"]

_CHUNK = 2 << 20
"""Numbers in one chunk of logits: 8 MB, which stays with the process when it is freed (`memory`)."""
_KEPT = 256 << 20
"""Most numbers of probabilities kept for several drafters of one batch (1 GB)."""


class WholeTeacher:
    """Over the target's own vocabulary, computed as it is asked for.

    Args:
        batch: windows and states.
        rows: [N] of the flattened batch.
        shared: several drafters will ask for the same rows.
    """

    def __init__(self, batch: Batch, rows: torch.Tensor, *, shared: bool = False) -> None:
        self._batch, self._rows = batch, rows
        fits = len(rows) * batch.target.model.vocab_size <= _KEPT
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {} if shared and fits else None

    def __call__(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._kept is not None and begin in self._kept:
            return self._kept[begin]
        logits = self._batch.logits(self._rows[begin:end])
        found = logits.softmax(-1), logits.argmax(-1)
        if self._kept is not None:
            self._kept[begin] = found
        return found


@dataclass(frozen=True, slots=True)
class PartOfHead:
    """The target's last norm and some rows of its output head, in float32.

    Args:
        norm: [H] the norm's weight.
        eps: added to the mean square.
        rows: [D, H] of the output head.
    """

    norm: torch.Tensor
    eps: float
    rows: torch.Tensor

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] states leaving the last layer -> [n, D]."""
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps) * self.norm
        return normed @ self.rows.T


class SubsetTeacher:
    """Over some ids of the vocabulary, for all rows at once; `of` gives it for some of them.

    Args:
        batch: windows and states.
        rows: [N] of the flattened batch, ascending.
        ids: [D] the draft vocabulary, each id once.
        part: the target's norm and its output head for `ids`, which suffices where the batch knows what was said.
        bias: [D] logarithms that probabilities are multiplied by the exponentials of.
    """

    def __init__(
        self, batch: Batch, rows: torch.Tensor, ids: torch.Tensor, part: PartOfHead, bias: torch.Tensor | None = None
    ) -> None:
        vocab_size = batch.target.model.vocab_size
        place = torch.full((vocab_size,), -1, dtype=torch.int64, device="cpu")
        place[ids] = torch.arange(len(ids), dtype=torch.int64, device="cpu")
        width = batch.windows.ids.numel()
        self._where = torch.full((width,), -1, dtype=torch.int64, device="cpu")
        self._where[rows] = torch.arange(len(rows), dtype=torch.int64, device="cpu")
        probabilities, best = [], []
        for some in torch.split(rows, max(1, _CHUNK // (vocab_size if batch.said is None else len(ids)))):
            if batch.said is None:
                logits = batch.logits(some)
                found = logits.softmax(-1)[:, ids]
                probabilities.append(found if bias is None else found * bias.exp())
                best.append(place[logits.argmax(-1)])
            else:
                found = part.logits(batch.final(some)) - batch.said.log_sum.flatten()[some].unsqueeze(-1)
                probabilities.append((found if bias is None else found.add_(bias)).exp_())
                best.append(place[batch.said.best.flatten()[some]])
        self._probabilities = (
            torch.cat(probabilities) if probabilities else torch.empty(0, len(ids), dtype=torch.float32, device="cpu")
        )
        self._best = torch.cat(best) if best else torch.empty(0, dtype=torch.int64, device="cpu")

    def of(self, rows: torch.Tensor) -> Teacher:
        """The teacher of these rows [n] of the flattened batch, all among those it was made for."""
        where = self._where[rows]
        assert int(where.min() if len(where) else 0) >= 0

        def teacher(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            part = where[begin:end]
            return self._probabilities[part], self._best[part]

        return teacher

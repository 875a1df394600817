"""Texts into windows of one length, side by side; none sees another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outpace.train.data.document import Document

__all__ = ["NOTHING", "Windows", "pack_documents"]

NOTHING = -1
"""Piece number of slots behind the last text of a window."""
_SHORTEST = 4
"""A piece of fewer tokens teaches next to nothing and costs its place."""


@dataclass(frozen=True, slots=True)
class Windows:
    """N windows of W tokens.

    Args:
        ids: [N, W] int64.
        pieces: [N, W] int64, which piece of the window a token belongs to, from 0; NOTHING behind the last.
        labels: [N, W] bool, whether the token is to be predicted.
    """

    ids: torch.Tensor
    pieces: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        """Tokens in a window."""
        return self.ids.shape[1]

    def __getitem__(self, which: slice | torch.Tensor) -> Windows:
        return Windows(self.ids[which], self.pieces[which], self.labels[which])

    @property
    def positions(self) -> torch.Tensor:
        """[N, W] int64 place of each token in its piece: every piece begins at 0."""
        places = torch.arange(self.width, dtype=torch.int64, device="cpu").expand_as(self.ids)
        begins = torch.where(self.starts, places, 0).cummax(1).values
        return places - begins

    @property
    def starts(self) -> torch.Tensor:
        """[N, W] bool, the first token of each piece."""
        first = torch.ones(len(self), 1, dtype=torch.bool, device="cpu")
        return torch.cat((first, self.pieces[:, 1:] != self.pieces[:, :-1]), 1)

    @property
    def counted(self) -> torch.Tensor:
        """[N, W] bool, rows whose *next* token is to be predicted and lies in the same piece."""
        result = torch.zeros_like(self.labels)
        same = (self.pieces[:, 1:] == self.pieces[:, :-1]) & (self.pieces[:, 1:] != NOTHING)
        result[:, :-1] = self.labels[:, 1:] & same
        return result

    @property
    def num_tokens(self) -> int:
        """Tokens that are not filling."""
        return int((self.pieces != NOTHING).sum())


def pack_documents(documents: Iterable[Document], width: int) -> Windows:
    """Fills windows one after the other; a text that does not fit into the rest of one goes on in the next.

    What goes on in another window begins there at position 0, without the text before it.

    Args:
        documents: texts.
        width: tokens in a window.
    """
    rows: list[tuple[list[int], list[int], list[bool]]] = []
    ids: list[int] = []
    pieces: list[int] = []
    labels: list[bool] = []

    def close() -> None:
        nonlocal ids, pieces, labels
        if any(labels):
            gap = width - len(ids)
            rows.append((ids + [0] * gap, pieces + [NOTHING] * gap, labels + [False] * gap))
        ids, pieces, labels = [], [], []

    for document in documents:
        begin = 0
        while len(document.ids) - begin >= _SHORTEST:
            if width - len(ids) < _SHORTEST:
                close()
            end = min(len(document.ids), begin + width - len(ids))
            number = pieces[-1] + 1 if pieces else 0
            ids += list(document.ids[begin:end])
            pieces += [number] * (end - begin)
            labels += list(document.labels[begin:end])
            begin = end
    close()
    return _as_tensors(rows, width)


def _as_tensors(rows: list[tuple[list[int], list[int], list[bool]]], width: int) -> Windows:
    def tensor(part: int, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[part] for row in rows], dtype=kind, device="cpu").reshape(-1, width)

    return Windows(tensor(0, torch.int64), tensor(1, torch.int64), tensor(2, torch.bool))

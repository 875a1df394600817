"""Texts into windows of one length, side by side; none sees another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
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

    @classmethod
    def joined(cls, parts: Sequence[Windows]) -> Windows:
        """All windows of some of one width, at least one, behind each other."""
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.pieces for part in parts]),
            torch.cat([part.labels for part in parts]),
        )

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
    """Fills windows with whole texts: the longest first, each where it leaves the least room.

    A text that fits into a window is never cut, for the rest of an answer without its beginning is nothing that a
    model says. What is longer than a window is cut into pieces of its width, each of which begins at position 0
    without the text before it. Pieces in which nothing is to be predicted are left out. Windows, and the pieces in
    them, come in the order of the texts.

    Args:
        documents: texts.
        width: tokens in a window.
    """
    pieces = [piece for document in documents for piece in _pieces(document, width)]
    windows = sorted(_best_fit([len(piece.ids) for piece in pieces], width))
    shape = (len(windows), width)
    ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
    numbers = torch.full(shape, NOTHING, dtype=torch.int64, device="cpu")
    labels = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for row, chosen in enumerate(windows):
        begin = 0
        for number, which in enumerate(chosen):
            piece = pieces[which]
            here = slice(begin, begin + len(piece.ids))
            ids[row, here] = torch.tensor(list(piece.ids), dtype=torch.int64, device="cpu")
            numbers[row, here] = number
            labels[row, here] = torch.tensor(list(piece.labels), dtype=torch.bool, device="cpu")
            begin = here.stop
    return Windows(ids, numbers, labels)


def _pieces(document: Document, width: int) -> Iterator[Document]:
    """The document, cut where it is longer than a window; only pieces that teach something."""
    for begin in range(0, len(document.ids), width):
        end = min(begin + width, len(document.ids))
        # The first token of a piece is never predicted: nothing stands before it.
        if end - begin >= _SHORTEST and any(document.labels[begin + 1 : end]):
            yield Document(document.ids[begin:end], document.labels[begin:end])


def _best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Numbers of the pieces that share a window, ascending; pieces are placed longest first (best fit decreasing)."""
    windows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens that are left: windows of which that is true
    rooms: list[int] = []  # its keys, ascending
    for piece in sorted(range(len(lengths)), key=lambda which: (-lengths[which], which)):
        at = bisect_left(rooms, lengths[piece])
        if at == len(rooms):
            window, room = len(windows), width
            windows.append([])
        else:
            room = rooms[at]
            window = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        windows[window].append(piece)
        left = room - lengths[piece]
        if left >= _SHORTEST:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(window)
    return [sorted(window) for window in windows]

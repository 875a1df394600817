"""Attention of rows that see a path through a tree instead of the last slots, with the bits of the path as a chain.

What a chain sums up over absolute slots is here summed up over positions along the path: up to a block edge before the
fork the slots themselves, in one product for all rows; from there on copies of each row's own keys and values, in path
order, in products of the shape that `outpace.kv.attention` has. So every sum has the same parts in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outpace.kv.cache import KEY_BLOCK
from outpace.kv.tiles import ROW_MULTIPLE, HeadLayout
from outpace.types import Segment

__all__ = ["PathProduct", "PathTile", "cut_paths"]

_MAX_ROWS = 16
"""Rows of one product: it bounds the copies, 2 MB a row of 8 heads of 128 over two blocks."""


@dataclass(frozen=True, slots=True)
class PathTile:
    """Rows with paths of one segment.

    Args:
        lane: of the request.
        begin: first of the rows in the pack.
        fork: slots that all paths share.
        paths: of each row.
        first_key: first position attended, a multiple of KEY_BLOCK.
        split: first position of the copies, a multiple of KEY_BLOCK, from `first_key` on.
        end_key: position after the last one attended, a multiple of KEY_BLOCK.
    """

    lane: int
    begin: int
    fork: int
    paths: tuple[tuple[int, ...], ...]
    first_key: int
    split: int
    end_key: int

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[n] position behind each row's own."""
        return self.fork + np.array([len(path) for path in self.paths])

    def folded_rows(self, layout: HeadLayout) -> int:
        """Query rows of a row of the pack in one key head, padded: M."""
        return -(-layout.group // ROW_MULTIPLE) * ROW_MULTIPLE

    def fold_indices(self, layout: HeadLayout) -> npt.NDArray[np.int64]:
        """Which of the R * num_heads query heads of a pack stands in each folded row, [num_kv_heads, n, M].

        Folded rows beyond the group repeat its last head.
        """
        rows = self.begin + np.arange(len(self.paths))
        heads = np.minimum(np.arange(self.folded_rows(layout)), layout.group - 1)
        first_heads = np.arange(layout.num_kv_heads) * layout.group
        indices: npt.NDArray[np.int64] = (
            rows[None, :, None] * layout.num_heads + first_heads[:, None, None] + heads[None, None, :]
        )
        return indices

    def copied_slots(self) -> npt.NDArray[np.int64]:
        """[n, end_key - split] the slot at each copied position; behind a row's own position its own again."""
        slots = np.tile(np.arange(self.split, self.end_key), (len(self.paths), 1))
        for row, path in zip(slots, self.paths, strict=True):
            first = max(0, self.fork - self.split)
            own = path[max(0, self.split - self.fork) :]
            row[first : first + len(own)] = own
            row[first + len(own) :] = path[-1]
        return slots


def cut_paths(segments: Sequence[Segment], sliding_window: int | None, *, row_by_row: bool) -> Iterator[PathTile]:
    """Divides the rows with paths into tiles; `row_by_row` copies all that a row sees, for a product of its own."""
    step = 1 if row_by_row else _MAX_ROWS
    for segment in segments:
        for first in range(0, len(segment.paths), step):
            paths = segment.paths[first : first + step]
            ends = [segment.fork + len(path) for path in paths]
            seen = 0 if sliding_window is None else max(0, min(ends) - sliding_window)
            first_key = (seen if row_by_row else min(seen, segment.fork)) // KEY_BLOCK * KEY_BLOCK
            yield PathTile(
                lane=segment.lane,
                begin=segment.begin + segment.num_straight + first,
                fork=segment.fork,
                paths=paths,
                first_key=first_key,
                split=first_key if row_by_row else segment.fork // KEY_BLOCK * KEY_BLOCK,
                end_key=-(-max(ends) // KEY_BLOCK) * KEY_BLOCK,
            )


class PathProduct:
    """A tile made ready. H key heads, n rows of M folded rows each.

    Args:
        tile: what is computed.
        layout: of the heads.
        sliding_window: positions a row sees at most; None for all.
        query: [H * n * M, head_dim], a part of the plan's folded query.
        output: the same of its output.
    """

    def __init__(
        self,
        tile: PathTile,
        layout: HeadLayout,
        sliding_window: int | None,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self._tile, self._heads = tile, layout.num_kv_heads
        self._count, self._folded = len(tile.paths), tile.folded_rows(layout)
        self._query, self._output = query, output
        ends = tile.ends[:, None]
        positions = np.arange(tile.first_key, tile.end_key)
        seen = (positions < ends) & (positions >= (0 if sliding_window is None else ends - sliding_window))
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
        self._mask = mask.view(1, self._count, 1, -1)
        self._copied: tuple[int, torch.Tensor] = (0, torch.empty(0, dtype=torch.int64, device="cpu"))

    def run(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fills the output from a layer's keys and values, [lanes * H, slots, head_dim]."""
        tile, heads, count, folded, dim = self._tile, self._heads, self._count, self._folded, keys.shape[2]
        lane = slice(tile.lane * heads, (tile.lane + 1) * heads)
        slots = self._slots_in(keys.shape[1])
        copies = (heads * count, tile.end_key - tile.split, dim)
        own_keys, own_values = (pool.view(-1, dim).index_select(0, slots).view(copies) for pool in (keys, values))
        before = tile.split - tile.first_key
        all_rows, each_row = (heads, count * folded), (heads * count, folded)
        scores = torch.bmm(self._query.view(*each_row, dim), own_keys.transpose(1, 2)).view(heads, count, folded, -1)
        if before:
            shared = keys[lane, tile.first_key : tile.split].transpose(1, 2)
            found = torch.bmm(self._query.view(*all_rows, dim), shared).view(heads, count, folded, before)
            scores = torch.cat((found, scores), -1)
        weights = torch.softmax(scores + self._mask, -1)
        for begin in range(0, weights.shape[-1], KEY_BLOCK):
            shape = all_rows if begin < before else each_row
            block = weights[..., begin : begin + KEY_BLOCK].reshape(*shape, KEY_BLOCK)
            if begin < before:
                rows = values[lane, tile.first_key + begin : tile.first_key + begin + KEY_BLOCK]
            else:
                rows = own_values[:, begin - before : begin - before + KEY_BLOCK]
            if begin:
                self._output.view(*shape, dim).baddbmm_(block, rows)
            else:
                torch.bmm(block, rows, out=self._output.view(*shape, dim))

    def _slots_in(self, capacity: int) -> torch.Tensor:
        """[H * n * copied positions] indices into a layer's rows of head_dim numbers, of lanes with this many slots."""
        if self._copied[0] != capacity:
            lanes = (self._tile.lane * self._heads + np.arange(self._heads)) * capacity
            indices = lanes[:, None, None] + self._tile.copied_slots()[None]
            self._copied = capacity, torch.from_numpy(indices.reshape(-1))
        return self._copied[1]

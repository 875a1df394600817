"""Causal attention of many requests over the cache, in which a row has the same bits in every pack.

Matrix kernels choose their order of summation by the shape of the product, so the usual way of computing attention
gives a row other bits beside other rows, or at another padded length. Rounding to int8 turns such a difference of
1e-7 into a whole step, and a token flips. Here nothing that can change a sum depends on what else is computed:

* scores are sums over head_dim, a constant. Query rows, the heads of a group folded in, are padded to a multiple of
  ROW_MULTIPLE, so that each row goes through the same kernel;
* the softmax runs over slots padded to a multiple of KEY_BLOCK; what a row must not see weighs exactly 0, and adding
  0 anywhere changes no sum;
* the weighted sum of values is taken KEY_BLOCK absolute slots at a time and added up in order. It is never one
  product over the whole length, which kernels split in parts by its length (MKL on AVX2: above 192).

Rows of a tree that do not lie straight behind the text have products of their own (`outpace.kv.paths`).

This rests on how kernels behave and is to be checked on each machine. With `row_by_row` every row is a product of
its own whose shape depends on its position alone, which holds anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.kv.paths import PathProduct, PathTile, cut_paths
from outpace.kv.tiles import HeadLayout, Tile, cut_tiles
from outpace.types import Segment

__all__ = ["AttentionPlan", "attend"]

_Indices = npt.NDArray[np.int64]


class AttentionPlan:
    """Everything about a pack's attention that does not depend on the layer; made once a pack.

    Its buffers are reused from layer to layer, so a plan serves one forward pass at a time.

    Args:
        segments: rows of the requests, in row order, together covering [0, R); empty ones are allowed.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key heads.
        head_dim: numbers in a head.
        sliding_window: slots a row sees at most, itself included; None for all.
        row_by_row: compute every row on its own: slow, and row-independent on any machine.

    Raises:
        ValueError: heads do not divide, the window is not at least 1, or segments leave a gap or overlap.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_window: int | None = None,
        row_by_row: bool = False,
    ) -> None:
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window={sliding_window} is not possible: it must be at least 1, or None")
        self.layout = HeadLayout(num_heads, num_kv_heads, head_dim)
        self.segments = tuple(segments)
        self.num_rows = _count_rows(self.segments)
        self._cache: KvCache | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")
        straight = [s.part(0, s.num_straight, s.begin) for s in self.segments if s.num_straight]
        tiles = cut_tiles(straight, self.layout, sliding_window=sliding_window, row_by_row=row_by_row)
        branches = list(cut_paths(self.segments, sliding_window, row_by_row=row_by_row))
        folds = [_fold_indices(tile, self.layout) for tile in tiles]
        folds += [tile.fold_indices(self.layout) for tile in branches]
        self._fold, self._unfold = _joint_indices(folds, self.num_rows * num_heads)
        self._query = torch.empty(len(self._fold), head_dim, dtype=torch.float32, device="cpu")
        self._output = torch.empty(len(self._fold), head_dim, dtype=torch.float32, device="cpu")
        most_scores = max((tile.num_scores(self.layout) for tile in tiles), default=0)
        scratch = torch.empty(2, most_scores, dtype=torch.float32, device="cpu")
        self._products: list[_Product | PathProduct] = []
        begin = 0
        parts: list[Tile | PathTile] = [*tiles, *branches]
        for tile, fold in zip(parts, folds, strict=True):
            query, output = (rows[begin : begin + fold.size] for rows in (self._query, self._output))
            self._products.append(
                PathProduct(tile, self.layout, sliding_window, query, output)
                if isinstance(tile, PathTile)
                else _product(tile, self.layout, sliding_window, query, output, scratch)
            )
            begin += fold.size

    def _slots_in(self, cache: KvCache) -> torch.Tensor:
        """Where the pack's key rows go: [R * num_kv_heads] indices into a layer's rows of head_dim numbers."""
        if cache is not self._cache:
            self._slots = _slot_indices(self.segments, self.layout, cache)
            self._cache = cache
        return self._slots


@dataclass(frozen=True, slots=True)
class _Product:
    """A tile made ready. G = lanes * num_kv_heads matrices of M folded rows over L slots.

    Args:
        first_head: first lane-major key head of the cache.
        first_key: first slot.
        query: [G, M, head_dim], a part of the plan's folded query.
        output: [G, M, head_dim], a part of the plan's folded output.
        scores: [G, M, L], scratch shared by the tiles of a plan.
        masked: [lanes, num_kv_heads, M, l] the last of the scores; the slots before are seen by every row.
        mask: [lanes, 1, M, l] what is added to them: 0 where a row sees a slot, -inf where it must not.
        weights: [G, M, L], scratch like the scores.
        blocks: the weights of KEY_BLOCK slots each, [G, M, KEY_BLOCK], in order.
    """

    first_head: int
    first_key: int
    query: torch.Tensor
    output: torch.Tensor
    scores: torch.Tensor
    masked: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    blocks: tuple[torch.Tensor, ...]

    def run(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fills the output from a layer's keys and values."""
        # Strides by hand: slicing these small views costs as much as the arithmetic on them.
        heads, num_keys, dim = self.scores.shape[0], self.scores.shape[2], keys.shape[2]
        stride = keys.stride(0)
        begin = self.first_head * stride + self.first_key * dim
        torch.bmm(self.query, keys.as_strided((heads, dim, num_keys), (stride, 1, dim), begin), out=self.scores)
        self.masked.add_(self.mask)
        torch.softmax(self.scores, -1, out=self.weights)
        shape, strides, step = (heads, KEY_BLOCK, dim), (stride, dim, 1), KEY_BLOCK * dim
        torch.bmm(self.blocks[0], values.as_strided(shape, strides, begin), out=self.output)
        for block in self.blocks[1:]:
            begin += step
            self.output.baddbmm_(block, values.as_strided(shape, strides, begin))


def attend(
    plan: AttentionPlan,
    cache: KvCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Writes a layer's keys and values to the slots of the pack, then attends over them.

    Row i of a segment sees slots [max(0, first_slot + i + 1 - sliding_window), first_slot + i + 1) of its lane; a row
    with a path the last `sliding_window` of the slots before the fork and on its path.

    Args:
        plan: made from the pack's segments.
        cache: of the same head layout, the segments' slots reserved.
        layer: whose rows are written and read.
        query: [R, num_heads, head_dim] float32, already scaled by head_dim**-0.5. Like key and value it may be a
            strided view.
        key: [R, num_kv_heads, head_dim] float32.
        value: [R, num_kv_heads, head_dim] float32.

    Returns:
        [R, num_heads * head_dim], a tensor of its own.

    Raises:
        ValueError: the cache's heads are not the plan's, or a slot to be written is not reserved.
    """
    dim = plan.layout.head_dim
    slots = plan._slots_in(cache)
    keys, values = cache.keys(layer), cache.values(layer)
    keys.view(-1, dim).index_copy_(0, slots, key.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, slots, value.reshape(-1, dim))
    torch.index_select(query.reshape(-1, dim), 0, plan._fold, out=plan._query)
    for product in plan._products:
        product.run(keys, values)
    return plan._output.index_select(0, plan._unfold).view(plan.num_rows, plan.layout.num_heads * dim)


def _count_rows(segments: Sequence[Segment]) -> int:
    num_rows = 0
    for segment in segments:
        if segment.begin != num_rows or segment.end < segment.begin or segment.first_slot < 0:
            raise ValueError(f"{segment} does not begin where the segment before it ends, at row {num_rows}")
        num_rows = segment.end
    return num_rows


def _slot_indices(segments: Sequence[Segment], layout: HeadLayout, cache: KvCache) -> torch.Tensor:
    if (cache.num_kv_heads, cache.head_dim) != (layout.num_kv_heads, layout.head_dim):
        raise ValueError(
            f"a cache of {cache.num_kv_heads} heads of {cache.head_dim} does not serve "
            f"{layout.num_kv_heads} key heads of {layout.head_dim}"
        )
    heads = np.arange(layout.num_kv_heads)
    parts = [np.empty(0, np.int64)]
    for segment in segments:
        cache.require(segment)
        lane_heads = (segment.lane * layout.num_kv_heads + heads) * cache.padded_capacity
        slots = np.arange(segment.first_slot, segment.length)
        parts.append((slots[:, None] + lane_heads).reshape(-1))
    return torch.from_numpy(np.concatenate(parts))


def _folded_rows(tile: Tile, group: int) -> tuple[_Indices, _Indices]:
    """For each lane and folded row of a tile its row within the run and its head within the group, [lanes, M].

    Folded rows beyond a lane's last repeat the last, so that padding is as finite as what it pads.
    """
    last = np.array([run.count * group - 1 for run in tile.runs])
    folded = np.minimum(np.arange(tile.rows), last[:, None])
    return folded // group, folded % group


def _fold_indices(tile: Tile, layout: HeadLayout) -> _Indices:
    """Which of the R * num_heads query heads of a pack stands in each folded row, [lanes, num_kv_heads, M]."""
    row, head = _folded_rows(tile, layout.group)
    begin = np.array([run.begin for run in tile.runs])
    first_heads = np.arange(layout.num_kv_heads) * layout.group
    indices: _Indices = ((begin[:, None] + row) * layout.num_heads + head)[:, None] + first_heads[:, None]
    return indices


def _joint_indices(folds: Sequence[_Indices], num_query_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The folded rows of all tiles, and for each query head the folded row that holds it."""
    fold = np.concatenate([np.empty(0, np.int64), *(indices.reshape(-1) for indices in folds)])
    unfold = np.empty(num_query_heads, np.int64)
    # From the last to the first: of folded rows that repeat a query head, the first is the real one.
    unfold[fold[::-1]] = np.arange(fold.size)[::-1]
    return torch.from_numpy(fold), torch.from_numpy(unfold)


def _product(
    tile: Tile,
    layout: HeadLayout,
    sliding_window: int | None,
    query: torch.Tensor,
    output: torch.Tensor,
    scratch: torch.Tensor,
) -> _Product:
    lanes, heads = len(tile.runs), layout.num_kv_heads
    folded = (lanes * heads, tile.rows, layout.head_dim)
    scored = (lanes * heads, tile.rows, tile.end_key - tile.first_key)
    scores, weights = (part[: tile.num_scores(layout)].view(scored) for part in scratch)
    mask = _mask(tile, layout.group, sliding_window)
    return _Product(
        first_head=tile.runs[0].lane * heads,
        first_key=tile.first_key,
        query=query.view(folded),
        output=output.view(folded),
        scores=scores,
        masked=scores.view(lanes, heads, tile.rows, -1)[..., -mask.shape[-1] :],
        mask=mask,
        weights=weights,
        blocks=torch.split(weights, KEY_BLOCK, -1),
    )


def _mask(tile: Tile, group: int, sliding_window: int | None) -> torch.Tensor:
    """What is added to the last scores of a tile; the slots before those are seen by every row.

    Returns:
        [lanes, 1, M, l] of 0 and -inf, l at least 1.
    """
    row, _ = _folded_rows(tile, group)
    end = np.array([run.first_slot for run in tile.runs])[:, None] + row + 1
    begin = np.zeros_like(end) if sliding_window is None else end - sliding_window
    first = min(int(end.min()), tile.end_key - 1) if begin.max() <= tile.first_key else tile.first_key
    slots = np.arange(first, tile.end_key)
    seen = (slots < end[..., None]) & (slots >= begin[..., None])
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))[:, None])

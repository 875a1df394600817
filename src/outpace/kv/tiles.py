"""How the rows of a pack are divided into rectangular products over neighbouring lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outpace.kv.cache import KEY_BLOCK
from outpace.types import Segment

__all__ = ["ROW_MULTIPLE", "HeadLayout", "Run", "Tile", "cut_tiles"]

ROW_MULTIPLE = 8
"""Folded query rows are padded to a multiple of this: matrix kernels treat remainders of fewer rows differently."""

_MAX_TILE_SCORES = 1 << 20
"""Most scores computed at a time, 4 MB: faster here than larger tiles, which leave the cache of a core."""

_CALL_SCORES = 1 << 13
"""The fixed cost of a tile's calls, in scores computed in the same time; decides when sharing a tile pays."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Query heads over key heads; query head h reads key head h // group.

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads, or a size is not at least 1.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"{self} is not possible: every size must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not possible with num_kv_heads={self.num_kv_heads}: "
                "it must be a multiple"
            )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one request: rows [begin, begin + count) of the pack, in slots from first_slot on."""

    lane: int
    begin: int
    count: int
    first_slot: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Runs of neighbouring lanes whose attention is one batched product, padded to the largest of them.

    Args:
        runs: one a lane, lanes ascending without a gap.
        rows: folded query rows a key head (row by row, the heads of a group side by side), a multiple of ROW_MULTIPLE.
        first_key: first slot attended, a multiple of KEY_BLOCK.
        end_key: slot after the last one attended, a multiple of KEY_BLOCK.
    """

    runs: tuple[Run, ...]
    rows: int
    first_key: int
    end_key: int

    def num_scores(self, layout: HeadLayout) -> int:
        """Scores this tile computes in one layer."""
        return len(self.runs) * layout.num_kv_heads * self.rows * (self.end_key - self.first_key)


def cut_tiles(
    segments: Sequence[Segment], layout: HeadLayout, *, sliding_window: int | None = None, row_by_row: bool = False
) -> list[Tile]:
    """Divides the rows of a pack into tiles of bounded size.

    Long segments are cut into runs of rows. Runs of neighbouring lanes share a tile where the padding this needs
    costs less than the calls it saves.

    Args:
        segments: the pack's.
        layout: heads of the model.
        sliding_window: slots a row sees at most, itself included; None for all.
        row_by_row: a tile for every row.
    """
    runs = sorted(_cut_runs(segments, layout, sliding_window, row_by_row), key=lambda run: (run.lane, run.first_slot))
    tiles = [_tile_of(run, layout, sliding_window) for run in runs]
    return tiles if row_by_row else _share(tiles, layout)


def _cut_runs(
    segments: Sequence[Segment], layout: HeadLayout, sliding_window: int | None, row_by_row: bool
) -> Iterator[Run]:
    for segment in segments:
        step = 1 if row_by_row else _most_rows(segment.length, layout, sliding_window)
        for begin in range(segment.begin, segment.end, step):
            count = min(step, segment.end - begin)
            yield Run(segment.lane, begin, count, segment.first_slot + begin - segment.begin)


def _most_rows(length: int, layout: HeadLayout, sliding_window: int | None) -> int:
    """Rows of one run, so that a tile stays within _MAX_TILE_SCORES, or fills the padding if even that exceeds it."""
    keys, most = _round_up(length, KEY_BLOCK), _MAX_TILE_SCORES
    if sliding_window is not None and sliding_window < length:
        # KEY_BLOCK rows see their window, each other, and at both ends up to a block of padding.
        keys, most = min(keys, sliding_window + 3 * KEY_BLOCK), KEY_BLOCK
    rows = min(most, _MAX_TILE_SCORES // (layout.num_heads * keys))
    return max(rows // ROW_MULTIPLE * ROW_MULTIPLE, -(-ROW_MULTIPLE // layout.group))


def _tile_of(run: Run, layout: HeadLayout, sliding_window: int | None) -> Tile:
    first_seen = 0 if sliding_window is None else max(0, run.first_slot + 1 - sliding_window)
    return Tile(
        runs=(run,),
        rows=_round_up(run.count * layout.group, ROW_MULTIPLE),
        first_key=first_seen // KEY_BLOCK * KEY_BLOCK,
        end_key=_round_up(run.first_slot + run.count, KEY_BLOCK),
    )


def _share(tiles: list[Tile], layout: HeadLayout) -> list[Tile]:
    """Joins tiles of neighbouring lanes, first to last, where the joint tile costs no more than the two."""
    shared = tiles[:1]
    for tile in tiles[1:]:
        last = shared[-1]
        joint = Tile(
            runs=last.runs + tile.runs,
            rows=max(last.rows, tile.rows),
            first_key=min(last.first_key, tile.first_key),
            end_key=max(last.end_key, tile.end_key),
        )
        scores = joint.num_scores(layout)
        neighbours = tile.runs[0].lane == last.runs[-1].lane + 1
        apart = last.num_scores(layout) + tile.num_scores(layout)
        if neighbours and scores <= min(_MAX_TILE_SCORES, apart + _CALL_SCORES):
            shared[-1] = joint
        else:
            shared.append(tile)
    return shared


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

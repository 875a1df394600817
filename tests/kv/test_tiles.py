from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kv.cache import KEY_BLOCK
from outpace.kv.tiles import ROW_MULTIPLE, HeadLayout, Tile, cut_tiles
from outpace.types import Segment

SMALL = HeadLayout(9, 3, 64)
LAYOUTS = (SMALL, HeadLayout(12, 2, 128), HeadLayout(4, 4, 32), HeadLayout(32, 8, 128), HeadLayout(32, 32, 128))


def pack(*requests: tuple[int, int, int]) -> list[Segment]:
    """Segments of (lane, first slot, rows)."""
    segments, begin = [], 0
    for lane, first_slot, rows in requests:
        segments.append(Segment(lane, begin, begin + rows, first_slot))
        begin += rows
    return segments


def lanes_of(tiles: list[Tile]) -> list[list[int]]:
    return [[run.lane for run in tile.runs] for tile in tiles]


def test_like_requests_in_neighbouring_lanes_share_a_tile() -> None:
    segments = pack(*((lane, 180 + lane, 6) for lane in (3, 0, 2, 1)))
    (tile,) = cut_tiles(segments, SMALL)
    assert lanes_of([tile]) == [[0, 1, 2, 3]]
    assert (tile.rows, tile.first_key, tile.end_key) == (24, 0, 256)


def test_a_gap_between_lanes_divides() -> None:
    segments = pack((0, 200, 1), (1, 200, 1), (3, 200, 1), (4, 200, 1))
    assert lanes_of(cut_tiles(segments, SMALL)) == [[0, 1], [3, 4]]


def test_a_long_context_does_not_lengthen_its_neighbours() -> None:
    segments = pack((0, 100, 1), (1, 4000, 1), (2, 100, 1))
    tiles = cut_tiles(segments, SMALL)
    assert lanes_of(tiles) == [[0], [1], [2]]
    assert [tile.end_key for tile in tiles] == [128, 4096, 128]


def test_a_prefill_chunk_does_not_widen_its_neighbours() -> None:
    segments = pack((0, 900, 1), (1, 900, 64), (2, 900, 1))
    assert [tile.rows for tile in cut_tiles(segments, SMALL)] == [8, 192, 8]


def test_a_window_starts_at_the_block_of_the_first_slot_seen() -> None:
    segments = pack((0, 1000, 3))
    (tile,) = cut_tiles(segments, SMALL, sliding_window=100)
    # Slots 901 to 1002 are seen.
    assert (tile.first_key, tile.end_key) == (896, 1024)
    (tile,) = cut_tiles(segments, SMALL, sliding_window=106)
    assert (tile.first_key, tile.end_key) == (768, 1024)


def test_row_by_row_is_a_tile_a_row() -> None:
    tiles = cut_tiles(pack((0, 126, 3), (1, 126, 3)), SMALL, row_by_row=True)
    assert [[(run.lane, run.begin, run.count, run.first_slot) for run in tile.runs] for tile in tiles] == [
        [(lane, 3 * lane + row, 1, 126 + row)] for lane in (0, 1) for row in range(3)
    ]
    assert [(tile.rows, tile.end_key) for tile in tiles] == [(8, 128), (8, 128), (8, 256)] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("first_slot", [0, 1000, 32_000])
def test_the_scores_of_a_prefill_chunk_are_bounded(layout: HeadLayout, window: int | None, first_slot: int) -> None:
    tiles = cut_tiles(pack((0, first_slot, 768), (1, first_slot, 1)), layout, sliding_window=window)
    assert max(tile.num_scores(layout) for tile in tiles) * 4 <= 64 << 20
    cost = sum(tile.num_scores(layout) for tile in tiles)
    width = min(first_slot + 768, window or 1 << 30) + 4 * KEY_BLOCK
    assert cost <= 2 * layout.num_heads * 768 * width, "padding at most doubles the work"


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=9 is not possible with num_kv_heads=2"):
        HeadLayout(9, 2, 64)
    with pytest.raises(ValueError, match="at least 1"):
        HeadLayout(9, 0, 64)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 3000), st.integers(1, 300)), max_size=8, unique_by=lambda item: item[0]
)


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, window=st.none() | st.integers(1, 500), layout=st.sampled_from(LAYOUTS))
def test_tiles_hold_every_row_once_and_everything_it_sees(
    requests: list[tuple[int, int, int]], window: int | None, layout: HeadLayout
) -> None:
    segments = pack(*requests)
    tiles = cut_tiles(segments, layout, sliding_window=window)
    rows = []
    for tile in tiles:
        assert tile.rows % ROW_MULTIPLE == tile.first_key % KEY_BLOCK == tile.end_key % KEY_BLOCK == 0
        lanes = [run.lane for run in tile.runs]
        assert lanes == list(range(lanes[0], lanes[0] + len(lanes)))
        for run in tile.runs:
            assert run.count * layout.group <= tile.rows
            assert tile.first_key <= max(0, run.first_slot + 1 - (window or 1 << 30))
            assert run.first_slot + run.count <= tile.end_key
            rows += [(run.lane, run.begin + i, run.first_slot + i) for i in range(run.count)]
    expected = [(s.lane, s.begin + i, s.first_slot + i) for s in segments for i in range(len(s))]
    assert sorted(rows) == sorted(expected)

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.protocols import Cache


def make_cache(**changes: int) -> KvCache:
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 16, "num_lanes": 4, "capacity": 300, "max_rows": 500}
    return KvCache(**(sizes | changes))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_it_is_a_cache() -> None:
    cache: Cache = make_cache()
    assert cache.capacity == 300


def test_views_are_lane_major_padded_to_whole_blocks_and_zero() -> None:
    cache = make_cache()
    assert cache.padded_capacity == 3 * KEY_BLOCK
    for layer in range(2):
        for rows in (cache.keys(layer), cache.values(layer)):
            assert rows.shape == (12, 3 * KEY_BLOCK, 16)
            assert rows.dtype == torch.float32
            assert rows.is_contiguous()
            assert not rows.any()
    cache.keys(0)[5] = 1
    assert not cache.keys(1).any()
    assert not cache.values(0).any()
    assert cache.keys(0).sum() == 3 * KEY_BLOCK * 16


def test_the_lowest_free_lane_comes_first() -> None:
    cache = make_cache()
    assert [cache.allocate() for _ in range(5)] == [0, 1, 2, 3, None]
    for lane in (2, 0, 3):
        cache.release(lane)
    assert [cache.allocate() for _ in range(4)] == [0, 2, 3, None]


def test_rows_are_counted_in_bytes() -> None:
    cache = make_cache()
    assert cache.bytes_per_row == 2 * 2 * 3 * 16 * 4
    lane = cache.allocate()
    assert lane is not None
    assert cache.reserve(lane, 7)
    assert cache.bytes_in_use == 7 * cache.bytes_per_row
    assert cache.free_rows == 493


def test_a_reservation_beyond_the_budget_changes_nothing() -> None:
    cache = make_cache(max_rows=400)
    cache.allocate(), cache.allocate()
    assert cache.reserve(0, 300)
    assert not cache.reserve(1, 101)
    assert cache.reserved(1) == 0
    assert cache.reserve(1, 100)
    assert cache.free_rows == 0
    assert cache.reserve(0, 20), "asking for fewer rows than there are is no change"
    assert cache.reserved(0) == 300
    cache.check_integrity()


def test_truncated_rows_go_back_to_the_budget_and_the_others_stay() -> None:
    cache = make_cache()
    cache.allocate()
    cache.reserve(0, 10)
    cache.keys(1)[0, :10] = torch.arange(10.0)[:, None]
    cache.truncate(0, 4)
    assert cache.reserved(0) == 4
    assert cache.free_rows == 496
    assert cache.keys(1)[0, :4, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("head_dim", [16, 8 + 1], ids=["whole pages", "parts of pages"])
def test_a_released_lane_reads_as_zero_and_its_neighbours_stay(head_dim: int) -> None:
    cache = make_cache(head_dim=head_dim)
    assert (3 * cache.padded_capacity * head_dim * 4 % mmap.PAGESIZE == 0) == (head_dim == 16)
    for lane in range(3):
        cache.allocate()
        assert cache.reserve(lane, 150)
        for layer in range(2):
            for rows in (cache.keys(layer), cache.values(layer)):
                rows.view(4, 3, -1, head_dim)[lane, :, :150] = float("nan") if lane == 1 else lane + 1
    cache.truncate(1, 3)
    cache.release(1)
    assert cache.allocate() == 1
    for layer in range(2):
        for rows in (cache.keys(layer), cache.values(layer)):
            lanes = rows.view(4, 3, -1, head_dim)
            assert not lanes[1].any()
            assert (lanes[0, :, :150] == 1).all()
            assert (lanes[2, :, :150] == 3).all()


def filled(cache: KvCache, lane: int, rows: int) -> None:
    """Every number of a row says which layer, lane and slot it is of."""
    for layer in range(cache.num_layers):
        for sign, pool in ((1, cache.keys(layer)), (-1, cache.values(layer))):
            lanes = pool.view(cache.num_lanes, cache.num_kv_heads, -1, cache.head_dim)
            lanes[lane, :, :rows] = sign * (1000.0 * (lane + 1) + torch.arange(rows))[:, None] + layer / 8


@pytest.mark.parametrize("rows", [0, 1, KEY_BLOCK, 150])
def test_a_copy_has_the_rows_asked_for_and_the_rest_stays(rows: int) -> None:
    cache = make_cache()
    for lane in range(3):
        cache.allocate()
        assert cache.reserve(lane, 150)
        filled(cache, lane, 150)
    before = [torch.stack([pool(layer).clone() for layer in range(2)]) for pool in (cache.keys, cache.values)]
    cache.copy(2, 1, rows)
    for pool, old in zip((cache.keys, cache.values), before, strict=True):
        lanes = torch.stack([pool(layer) for layer in range(2)]).view(2, 4, 3, -1, 16)
        expected = old.view(2, 4, 3, -1, 16).clone()
        expected[:, 1, :, :rows] = expected[:, 2, :, :rows]
        assert torch.equal(lanes, expected)
    cache.check_integrity()
    assert cache.reserved(1) == 150


def test_copies_of_rows_that_are_not_reserved_are_refused() -> None:
    cache = make_cache()
    cache.allocate(), cache.allocate()
    assert cache.reserve(0, 10) and cache.reserve(1, 5)
    for source, target, lane, has in ((0, 1, 1, 5), (1, 0, 1, 5)):
        with pytest.raises(ValueError, match=f"6 rows cannot be copied .*: lane {lane} has {has}"):
            cache.copy(source, target, 6)
    with pytest.raises(ValueError, match="-1 rows cannot be copied"):
        cache.copy(0, 1, -1)
    with pytest.raises(ValueError, match="lane 3 is not allocated"):
        cache.copy(0, 3, 1)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, KEY_BLOCK, 299])
@pytest.mark.parametrize("head_dim", [16, 64, 8 + 1], ids=["whole pages", "wide", "parts of pages"])
def test_a_trimmed_lane_reads_as_zero_behind_its_rows(head_dim: int, rows: int) -> None:
    cache = make_cache(head_dim=head_dim, max_rows=1000)
    for lane in range(3):
        cache.allocate()
        assert cache.reserve(lane, 300)
        filled(cache, lane, 300)
    before = [torch.stack([pool(layer).clone() for layer in range(2)]) for pool in (cache.keys, cache.values)]
    cache.truncate(1, rows)
    cache.trim(1)
    cache.check_integrity()
    for pool, old in zip((cache.keys, cache.values), before, strict=True):
        lanes = torch.stack([pool(layer) for layer in range(2)]).view(2, 4, 3, -1, head_dim)
        expected = old.view(2, 4, 3, -1, head_dim).clone()
        expected[:, 1, :, rows:] = 0
        assert torch.equal(lanes, expected)
    assert cache.reserved(1) == rows
    assert cache.reserve(1, 300)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_trimming_gives_memory_back() -> None:
    mebibyte = 1 << 20
    cache = make_cache(num_kv_heads=2, head_dim=64, num_lanes=8, capacity=1 << 17, max_rows=1 << 20)
    before = resident_bytes()
    lane = cache.allocate()
    assert lane is not None
    cache.reserve(lane, 1 << 17)
    cache.keys(0)[:2] = 1
    assert resident_bytes() - before > 60 * mebibyte
    cache.truncate(lane, 1 << 14)
    cache.trim(lane)
    assert 7 * mebibyte < resident_bytes() - before < 12 * mebibyte
    cache.release(lane)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_committed_when_written_and_given_back() -> None:
    mebibyte = 1 << 20
    before = resident_bytes()
    # 2 GiB of addresses: 512 MiB a pool, 64 MiB a lane of it, 32 MiB a head.
    cache = make_cache(num_kv_heads=2, head_dim=64, num_lanes=8, capacity=1 << 17, max_rows=1 << 20)
    assert resident_bytes() - before < 4 * mebibyte
    lane = cache.allocate()
    assert lane is not None
    cache.reserve(lane, 1)
    cache.keys(0)[:2, :1] = 1
    assert resident_bytes() - before < 4 * mebibyte, "one row must not commit more than its pages"
    cache.reserve(lane, 1 << 17)
    cache.keys(0)[:2] = 1
    assert resident_bytes() - before > 60 * mebibyte
    cache.release(lane)
    assert resident_bytes() - before < 8 * mebibyte


def test_a_cache_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        cache = make_cache()
        cache.keys(0)[0, 0] = 1
    cache.keys(0)[0, 1] = 2
    assert cache.keys(0)[0, :3, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "num_lanes", "capacity", "max_rows"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 is not possible"):
        make_cache(**{name: 0})


def test_misuse_is_refused() -> None:
    cache = make_cache()
    for misuse in (
        cache.release,
        cache.reserved,
        cache.trim,
        lambda lane: cache.reserve(lane, 1),
        lambda n: cache.truncate(n, 0),
    ):
        for lane in (0, -1, 4):
            with pytest.raises(ValueError, match=f"lane {lane} is not allocated"):
                misuse(lane)
    cache.allocate()
    with pytest.raises(ValueError, match="cannot hold 301 rows: a lane has 300"):
        cache.reserve(0, 301)
    with pytest.raises(ValueError, match="cannot hold -1 rows"):
        cache.reserve(0, -1)
    cache.reserve(0, 5)
    with pytest.raises(ValueError, match="cannot be truncated to 6 rows: it has 5"):
        cache.truncate(0, 6)
    with pytest.raises(ValueError, match="cannot be truncated to -1 rows"):
        cache.truncate(0, -1)
    cache.release(0)
    with pytest.raises(ValueError, match="lane 0 is not allocated"):
        cache.release(0)
    cache.check_integrity()
    assert cache.free_rows == 500


def test_books_that_do_not_balance_are_found() -> None:
    def broken(**attributes: object) -> KvCache:
        cache = make_cache()
        cache.allocate()
        cache.reserve(0, 10)
        cache.check_integrity()
        for name, value in attributes.items():
            setattr(cache, name, value)
        return cache

    for attributes, message in (
        ({"_free": [0, 1, 2, 3]}, "free lanes"),
        ({"_free": [1, 2]}, "free lanes"),
        ({"_used_rows": 9}, "10 rows but 9 are booked"),
        ({"max_rows": 9}, "10 rows are reserved of a budget of 9"),
        ({"_touched": {0: 9}}, "lane 0 holds 10 rows"),
    ):
        with pytest.raises(AssertionError, match=message):
            broken(**attributes).check_integrity()


class CacheBooks(RuleBasedStateMachine):
    """The cache against a dictionary of lane -> rows."""

    @initialize(num_lanes=st.integers(1, 4), max_rows=st.integers(1, 60))
    def start(self, num_lanes: int, max_rows: int) -> None:
        self.cache = KvCache(
            num_layers=1, num_kv_heads=1, head_dim=8, num_lanes=num_lanes, capacity=20, max_rows=max_rows
        )
        self.num_lanes, self.max_rows = num_lanes, max_rows
        self.rows: dict[int, int] = {}

    @rule()
    def allocate(self) -> None:
        free = [lane for lane in range(self.num_lanes) if lane not in self.rows]
        lane = self.cache.allocate()
        assert lane == (free[0] if free else None)
        if lane is not None:
            self.rows[lane] = 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), rows=st.integers(0, 20))
    def reserve(self, data: st.DataObject, rows: int) -> None:
        lane = data.draw(st.sampled_from(sorted(self.rows)))
        fits = sum(self.rows.values()) - self.rows[lane] + max(rows, self.rows[lane]) <= self.max_rows
        assert self.cache.reserve(lane, rows) is fits
        if fits:
            self.rows[lane] = max(rows, self.rows[lane])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.rows)))
        self.rows[lane] = data.draw(st.integers(0, self.rows[lane]))
        self.cache.truncate(lane, self.rows[lane])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.cache.trim(data.draw(st.sampled_from(sorted(self.rows))))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.release(lane)
        del self.rows[lane]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert {lane: self.cache.reserved(lane) for lane in self.rows} == self.rows
        assert self.cache.free_rows == self.max_rows - sum(self.rows.values())


CacheBooks.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCacheBooks = CacheBooks.TestCase

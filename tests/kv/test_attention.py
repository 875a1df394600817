from __future__ import annotations

import pytest
import torch

from outpace.kv.attention import AttentionPlan, attend
from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.types import Segment
from tests.kv.sequences import LAYER, LAYOUTS, Part, Sequences, of_parts


def plan_of(*segments: Segment, window: int | None = None) -> AttentionPlan:
    return AttentionPlan(segments, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=window)


def small_cache() -> KvCache:
    cache = KvCache(num_layers=2, num_kv_heads=2, head_dim=8, num_lanes=3, capacity=200, max_rows=600)
    for lane in range(3):
        assert cache.allocate() == lane
        assert cache.reserve(lane, 150)
    return cache


def random_rows(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, 8), torch.randn(rows, 2, 8), torch.randn(rows, 2, 8)


@pytest.mark.parametrize("row_by_row", [False, True])
@pytest.mark.parametrize("window", [None, 1, 60, KEY_BLOCK])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_agrees_with_the_definition_in_float64(
    layout: tuple[int, int, int], window: int | None, row_by_row: bool
) -> None:
    sequences = Sequences(layout, length=KEY_BLOCK + 40, sliding_window=window)
    exact = sequences.exact()
    for parts in (
        [Part(0, 0, 0, 1)],
        [Part(4, 1, 0, sequences.length)],
        [Part(1, 0, 3, 5), Part(2, 1, 2, 6), Part(3, 0, 4, 5), Part(7, 1, 120, 30), Part(8, 0, 126, 1)],
    ):
        sequences.fill(parts, stale=50.0)
        result = sequences.attend(parts, row_by_row=row_by_row)
        torch.testing.assert_close(result.double(), of_parts(exact, parts), rtol=0, atol=1e-5)


def test_rows_are_written_to_the_slots_of_their_segments_and_nowhere_else() -> None:
    cache = small_cache()
    query, key, value = random_rows(5)
    attend(plan_of(Segment(2, 0, 3, 7), Segment(0, 3, 5, 0)), cache, 1, query, key, value)
    for pool, rows in ((cache.keys(1), key), (cache.values(1), value)):
        expected = torch.zeros(3, 2, cache.padded_capacity, 8)
        expected[2, :, 7:10] = rows[:3].transpose(0, 1)
        expected[0, :, 0:2] = rows[3:].transpose(0, 1)
        assert torch.equal(pool.view_as(expected), expected)
    assert not cache.keys(0).any()


def test_strided_views_of_one_product_do() -> None:
    sequences = Sequences((9, 3, 64), length=20)
    heads, kv_heads, dim = sequences.layout
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    fused = torch.cat([of[0].flatten(1) for of in (sequences.query, sequences.key, sequences.value)], 1)
    query, key, value = (part.unflatten(1, (-1, dim)) for part in fused.split(sizes, 1))
    assert not query.is_contiguous()
    result = attend(sequences.plan([Part(0, 0, 0, 20)]), sequences.cache, LAYER, query, key, value)
    assert torch.equal(result, sequences.attend([Part(0, 0, 0, 20)]))


def test_a_plan_serves_every_layer_and_its_results_are_not_overwritten() -> None:
    cache = small_cache()
    plan = plan_of(Segment(0, 0, 2, 0))
    layers = [random_rows(2), random_rows(2)]
    results = [attend(plan, cache, layer, *rows) for layer, rows in enumerate(layers)]
    for layer, rows in enumerate(layers):
        assert torch.equal(results[layer], attend(plan_of(Segment(0, 0, 2, 0)), cache, layer, *rows))
    assert not torch.equal(results[0], results[1])


def test_a_plan_follows_the_cache_it_is_given() -> None:
    large = KvCache(num_layers=1, num_kv_heads=2, head_dim=8, num_lanes=3, capacity=900, max_rows=900)
    for _ in range(3):
        large.allocate()
    large.reserve(2, 10)
    plan, rows = plan_of(Segment(2, 0, 4, 0)), random_rows(4)
    first = attend(plan, small_cache(), 0, *rows)
    assert torch.equal(attend(plan, large, 0, *rows), first)
    assert torch.equal(large.keys(0)[4:6, :4], rows[1].transpose(0, 1))


def test_empty_segments_and_empty_packs() -> None:
    cache = small_cache()
    rows = random_rows(2)
    plain = attend(plan_of(Segment(1, 0, 2, 0)), cache, 0, *rows)
    padded = plan_of(Segment(0, 0, 0, 5), Segment(1, 0, 2, 0), Segment(2, 2, 2, 9))
    assert torch.equal(attend(padded, cache, 0, *rows), plain)
    assert attend(plan_of(), cache, 0, *random_rows(0)).shape == (0, 32)


def test_misuse_is_refused() -> None:
    cache = small_cache()
    with pytest.raises(ValueError, match="ends beyond the 150 reserved rows"):
        attend(plan_of(Segment(0, 0, 2, 149)), cache, 0, *random_rows(2))
    cache.release(1)
    with pytest.raises(ValueError, match="lane 1 is not allocated"):
        attend(plan_of(Segment(1, 0, 2, 0)), cache, 0, *random_rows(2))
    with pytest.raises(ValueError, match="a cache of 2 heads of 8 does not serve 3 key heads of 64"):
        attend(
            AttentionPlan([Segment(0, 0, 1, 0)], num_heads=9, num_kv_heads=3, head_dim=64),
            cache,
            0,
            torch.randn(1, 9, 64),
            torch.randn(1, 3, 64),
            torch.randn(1, 3, 64),
        )
    for segments in ((Segment(0, 1, 2, 0),), (Segment(0, 0, 2, 0), Segment(1, 1, 3, 0)), (Segment(0, 0, 1, -1),)):
        with pytest.raises(ValueError, match="does not begin where the segment before it ends"):
            plan_of(*segments)
    with pytest.raises(ValueError, match="sliding_window=0 is not possible"):
        plan_of(Segment(0, 0, 1, 0), window=0)

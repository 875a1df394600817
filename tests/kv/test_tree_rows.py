"""A node of a tree has the bits it has as the last row of its path: at every edge, beside others, on two threads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outpace.kv.attention import AttentionPlan, attend
from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.types import Segment
from tests.kv.sequences import LAYER, LAYOUTS
from tests.trees import chain_of, random_parents, tree_segment

LENGTH = 2 * KEY_BLOCK + 40
LANES = 4
CASES = [(layout, None) for layout in LAYOUTS] + [((9, 3, 64), 20), ((4, 4, 32), KEY_BLOCK), ((14, 2, 64), 1)]
FORKS = (0, 1, 7, *(edge + i for edge in (KEY_BLOCK, 2 * KEY_BLOCK) for i in (-20, -3, -1, 0, 1)))

each_case = pytest.mark.parametrize("case", CASES, ids=str)
Case = tuple[tuple[int, int, int], int | None]


class Text:
    """A text, and a tree behind its first `fork` tokens, each with a query, a key and a value."""

    def __init__(self, case: Case, fork: int, parents: Sequence[int], seed: int) -> None:
        (self.heads, self.kv_heads, self.dim), self.window = case
        self.fork, self.parents = fork, parents
        generator = torch.Generator().manual_seed(seed)
        count = fork + len(parents)
        self.query = torch.randn(count, self.heads, self.dim, generator=generator) * 2 * self.dim**-0.5
        self.key = torch.randn(count, self.kv_heads, self.dim, generator=generator)
        self.value = torch.randn(count, self.kv_heads, self.dim, generator=generator)

    def cache(self) -> KvCache:
        found = KvCache(
            num_layers=2,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            num_lanes=LANES,
            capacity=LENGTH,
            max_rows=LANES * LENGTH,
        )
        for lane in range(LANES):
            assert found.allocate() == lane and found.reserve(lane, LENGTH)
        return found

    def attend(
        self, cache: KvCache, segments: Sequence[Segment], rows: Sequence[int], *, row_by_row: bool = False
    ) -> torch.Tensor:
        plan = AttentionPlan(
            segments,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            sliding_window=self.window,
            row_by_row=row_by_row,
        )
        chosen = list(rows)
        return attend(plan, cache, LAYER, self.query[chosen], self.key[chosen], self.value[chosen])

    def fill(self, cache: KvCache, lane: int, stale: float) -> None:
        """The text's rows in a lane, `stale` behind them."""
        for pool, rows in ((cache.keys(LAYER), self.key), (cache.values(LAYER), self.value)):
            slots = pool.view(LANES, self.kv_heads, -1, self.dim)[lane]
            slots[:, : self.fork] = rows[: self.fork].transpose(0, 1)
            slots[:, self.fork :] = stale

    def node_alone(self, node: int, *, row_by_row: bool) -> torch.Tensor:
        """A node as the last row of its path, the path being all there is."""
        cache, path = self.cache(), chain_of(self.parents, node)
        self.fill(cache, 0, 0.0)
        found = torch.empty(0)
        for place, each in enumerate(path):
            segment = Segment(0, 0, 1, self.fork + place)
            found = self.attend(cache, [segment], [self.fork + each], row_by_row=row_by_row)
        return found

    def tree_rows(self, trunk: int) -> list[int]:
        return list(range(self.fork - trunk, self.fork + len(self.parents)))


@each_case
@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("row_by_row", [False, True], ids=["blocks", "row by row"])
@pytest.mark.thinned(3)
def test_a_tree_is_its_paths(case: Case, fork: int, row_by_row: bool) -> None:
    source = random.Random(fork * 7 + row_by_row)
    for _ in range(3):
        parents = random_parents(source, source.choice([1, 2, 5, 9, 24]))
        trunk = min(fork, source.choice([0, 1, 5]))
        text = Text(case, fork, parents, fork)
        cache, lane = text.cache(), source.randrange(LANES)
        text.fill(cache, lane, 5.0)
        segment = tree_segment(lane, 0, fork - trunk, trunk, parents)
        found = text.attend(cache, [segment], text.tree_rows(trunk), row_by_row=row_by_row)
        for node in range(len(parents)):
            alone = text.node_alone(node, row_by_row=row_by_row)
            assert torch.equal(found[trunk + node], alone[0]), (parents, node)


@each_case
@pytest.mark.parametrize("threads", [1, 2])
def test_trees_beside_prefill_decoding_and_each_other(case: Case, threads: int) -> None:
    source = random.Random(3)
    parents = random_parents(source, 16)
    text = Text(case, 2 * KEY_BLOCK - 5, parents, 8)
    alone = torch.cat([text.node_alone(node, row_by_row=False) for node in range(16)])
    cache = text.cache()
    for lane in (1, 2, 3):
        text.fill(cache, lane, -7.0)
    fork = text.fork
    segments = [
        Segment(0, 0, 97, 0),
        tree_segment(1, 97, fork - 1, 1, parents),
        Segment(2, 114, 115, fork),
        tree_segment(3, 115, fork, 0, parents),
    ]
    rows = [*range(97), *text.tree_rows(1), 4, *text.tree_rows(0)]
    torch.set_num_threads(threads)
    found = text.attend(cache, segments, rows)
    torch.set_num_threads(1)
    assert torch.equal(found[98:114], alone) and torch.equal(found[115:], alone)


def test_growing_level_by_level_is_the_tree_at_once() -> None:
    """A draft model computes siblings whose ancestors are in the cache already."""
    case: Case = ((9, 3, 64), None)
    parents = [-1, -1, 0, 0, 1, 2, 4, 5]
    text = Text(case, KEY_BLOCK - 2, parents, 8)
    whole, grown = text.cache(), text.cache()
    for cache in (whole, grown):
        text.fill(cache, 1, 9.0)
    segment = tree_segment(1, 0, text.fork, 0, parents)
    wanted = text.attend(whole, [segment], text.tree_rows(0))
    for first, last in ((0, 2), (2, 5), (5, 8)):
        part = segment.part(first, last, 0)
        found = text.attend(grown, [part], [text.fork + node for node in range(first, last)])
        assert torch.equal(found, wanted[first:last])


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, 0, 2, 8, 9, ((8,), (8, 9))), "fork behind its first path"),
        (Segment(0, 0, 1, 8, 8, ((8,), (8, 9))), "more paths than rows"),
        (Segment(0, 0, 2, 8, 8, ((8,), (8, 10))), "path of slot 9"),
        (Segment(0, 0, 2, 8, 8, ((8,), (7, 9))), "path of slot 9"),
        (Segment(0, 0, 2, 8, 8, ((8,), ())), "path of slot 9"),
        (Segment(0, 0, 2, LENGTH - 1, LENGTH - 1, ((LENGTH - 1,), (LENGTH,))), "reserved rows"),
    ],
)
def test_paths_that_lead_astray_are_refused(segment: Segment, message: str) -> None:
    text = Text(((4, 4, 32), None), 8, [-1, 0], 1)
    with pytest.raises(ValueError, match=message):
        text.attend(text.cache(), [segment], [8, 9][: len(segment)])

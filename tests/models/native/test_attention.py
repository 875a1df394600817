"""Attention over a cache: right to float32, the same bits in every task, and blind to slots it must not see."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outpace.types import Segment
from tests.models.native.calls import attend
from tests.trees import chain_of, random_parents, tree_segment

LENGTH = 304
KV_HEADS = 2
DIMS, GROUPS, WINDOWS = (8, 12, 16, 64, 80, 128), (1, 3, 6, 9), (None, 1, 7, 8, 9, 64, 65, 128)
SHAPES = [(dim, group) for dim in DIMS for group in GROUPS]
EDGES = [edge + i for edge in (8, 16, 32, 64, 96, 128, 192, 256) for i in (-1, 0, 1)]

each_shape = pytest.mark.parametrize(("dim", "group"), SHAPES)
each_window = pytest.mark.parametrize("window", WINDOWS)


class Case:
    """Random queries of one request, and keys and values of two lanes, of which lane 1 is its own."""

    def __init__(self, dim: int, group: int, window: int | None) -> None:
        generator = torch.Generator().manual_seed(dim * 100 + group)
        heads = KV_HEADS * group
        self.query = torch.randn(LENGTH, heads, dim, generator=generator) * 2 * dim**-0.5
        self.keys = torch.randn(2, KV_HEADS, LENGTH, dim, generator=generator)
        self.values = torch.randn(2, KV_HEADS, LENGTH, dim, generator=generator)
        self.group, self.window = group, window

    def rows(self, begin: int, end: int, *, each: int | None = None, stale: float | None = None) -> torch.Tensor:
        """Rows [begin, end) in one segment; `stale` in every slot none of them must see."""
        keys, values = self.keys, self.values
        if stale is not None:
            keys, values = keys.clone(), values.clone()
            first = max(0, begin + 1 - self.window) if self.window else 0
            for pool in (keys, values):
                pool[0] = stale
                pool[1, :, :first] = stale
                pool[1, :, end:] = stale
        segment = Segment(1, 0, end - begin, begin)
        return attend(self.query[begin:end], keys, values, [segment], self.window, each=each)

    def alone(self, rows: range) -> torch.Tensor:
        return torch.cat([self.rows(row, row + 1) for row in rows])

    def exact(self) -> torch.Tensor:
        """All rows in float64 from the definition."""
        slots = torch.arange(LENGTH)
        seen = slots <= slots[:, None]
        if self.window is not None:
            seen &= slots > slots[:, None] - self.window
        keys, values = (pool[1].double().repeat_interleave(self.group, 0) for pool in (self.keys, self.values))
        scores = torch.einsum("ihd,hjd->hij", self.query.double(), keys).masked_fill(~seen, float("-inf"))
        return torch.einsum("hij,hjd->ihd", scores.softmax(-1), values)


@each_window
@each_shape
@pytest.mark.thinned(2)
def test_is_softmax_attention(dim: int, group: int, window: int | None) -> None:
    case = Case(dim, group, window)
    found, wanted = case.rows(0, LENGTH), case.exact()
    assert (found - wanted).abs().max() < 3e-6


@pytest.mark.parametrize("window", [None, 9, 65])
@pytest.mark.parametrize(("dim", "group"), [(8, 6), (12, 1), (16, 9), (64, 3), (80, 1), (128, 6)])
def test_every_length_alone_in_chunks_and_at_once(dim: int, group: int, window: int | None) -> None:
    case = Case(dim, group, window)
    alone = case.alone(range(LENGTH))
    assert torch.equal(case.rows(0, LENGTH), alone)
    for size in (2, 7, 64, 200):
        for begin in range(0, LENGTH, size):
            end = min(begin + size, LENGTH)
            assert torch.equal(case.rows(begin, end), alone[begin:end]), (begin, end)


@each_window
@each_shape
def test_blocks_at_every_edge(dim: int, group: int, window: int | None) -> None:
    case = Case(dim, group, window)
    whole = case.rows(0, LENGTH)
    for size in (1, 2, 5, 16):
        for edge in EDGES:
            begin = max(0, edge - size)
            assert torch.equal(case.rows(begin, edge), whole[begin:edge]), (begin, edge)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("group", GROUPS)
def test_any_number_of_rows_in_a_task(group: int, window: int | None) -> None:
    case = Case(16, group, window)
    wanted = case.rows(0, LENGTH)
    for each in (1, 2, 7, 64, LENGTH):
        assert torch.equal(case.rows(0, LENGTH, each=each), wanted), each


@pytest.mark.parametrize("stale", [float("nan"), float("inf"), float("-inf"), 1e30], ids=str)
@each_window
@pytest.mark.parametrize(("dim", "group"), [(8, 1), (12, 3), (64, 9), (80, 6)])
def test_stale_slots_never_matter(dim: int, group: int, window: int | None, stale: float) -> None:
    """What a rejected draft or another request left behind, beyond a row's end and before its window."""
    case = Case(dim, group, window)
    wanted = case.rows(0, LENGTH)
    for begin, end in [*((edge - 1, edge) for edge in EDGES), (3, 13), (60, 75), (120, 200)]:
        assert torch.equal(case.rows(begin, end, stale=stale), wanted[begin:end]), (begin, end)


def test_requests_side_by_side() -> None:
    """Segments of several lengths and lanes in one pack, empty ones among them."""
    case, other = Case(64, 3, None), Case(64, 3, None)
    keys, values = case.keys, case.values
    query = torch.cat((case.query[40:50], case.query[:0], other.query[7:8], case.query[100:101]))
    segments = [Segment(1, 0, 10, 40), Segment(0, 10, 10, 9), Segment(0, 10, 11, 7), Segment(1, 11, 12, 100)]
    found = attend(query, keys, values, segments)
    whole = case.rows(0, LENGTH)
    assert torch.equal(found[:10], whole[40:50]) and torch.equal(found[11], whole[100])
    assert torch.equal(found[10:11], attend(other.query[7:8], keys, values, [Segment(0, 0, 1, 7)]))


@pytest.mark.parametrize(
    ("where", "value"),
    [*((where, float("nan")) for where in ("query", "key", "value")), ("query", float("inf")), ("value", float("inf"))],
)
def test_what_is_no_number_stays_with_the_rows_that_see_it(where: str, value: float) -> None:
    case = Case(64, 3, 20)
    clean = case.rows(0, LENGTH)
    if where == "query":
        case.query[100, 0, 5] = value
    else:
        getattr(case, f"{where}s")[1, 0, 100, 5] = value
    found = case.rows(0, LENGTH)
    spoilt = range(100, 101) if where == "query" else range(100, 120)
    heads = range(1) if where == "query" else range(3)
    for row in range(95, 125):
        for head in range(6):
            if row in spoilt and head in heads:
                assert not found[row, head].isfinite().all(), (row, head)
            else:
                assert torch.equal(found[row, head], clean[row, head]), (row, head)


def test_scores_far_apart() -> None:
    """A softmax of one slot, and one whose largest score is far below the others' exponent range."""
    case = Case(16, 1, None)
    case.query *= 300
    assert (case.rows(0, LENGTH) - case.exact()).abs().max() < 1e-3
    case.query *= 0
    assert (case.rows(0, LENGTH) - case.exact()).abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 1, 9, 65])
@pytest.mark.parametrize(("dim", "group"), [(8, 6), (12, 1), (16, 9), (64, 3), (80, 1), (128, 6)])
def test_a_tree_is_its_paths(dim: int, group: int, window: int | None) -> None:
    """Nodes of random trees at every edge, against each path computed as the chain it is."""
    case, source = Case(dim, group, window), random.Random(dim)
    for edge in EDGES:
        fork = edge - source.randint(0, 6)
        parents = random_parents(source, source.choice([1, 3, 9, 20]))
        found = attend_tree(case, fork, parents, each=source.choice([None, 1, 5]))
        for node in range(len(parents)):
            slots = [*range(fork), *(fork + each for each in chain_of(parents, node))]
            keys, values = (torch.cat((pool[:, :, slots], pool[:, :, :24]), 2) for pool in (case.keys, case.values))
            keys, values = (pool[:, :, : pool.shape[2] // 8 * 8] for pool in (keys, values))
            alone = attend(case.query[slots[-1:]], keys, values, [Segment(1, 0, 1, len(slots) - 1)], window)
            assert torch.equal(found[node], alone[0]), (fork, parents, node)


def attend_tree(case: Case, fork: int, parents: Sequence[int], each: int | None = None) -> torch.Tensor:
    query = case.query[fork : fork + len(parents)]
    keys, values = case.keys.clone(), case.values.clone()
    for pool in (keys, values):
        pool[1, :, fork + len(parents) :] = float("nan")
    return attend(query, keys, values, [tree_segment(1, 0, fork, 0, parents)], case.window, each=each)

"""A row has the same bits in every pack: alone, in blocks and chunks, beside others, on one thread and on two."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kv.cache import KEY_BLOCK
from tests.kv.sequences import LAYOUTS, NUM_LANES, Part, Sequences, of_parts

LENGTH = 4 * KEY_BLOCK + 5
CASES = [(layout, None) for layout in LAYOUTS] + [((9, 3, 64), 200), ((4, 4, 32), KEY_BLOCK), ((14, 2, 64), 1)]
EDGES = sorted({edge + i for edge in range(KEY_BLOCK, LENGTH, KEY_BLOCK) for i in (-1, 0, 1)})

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def computed_alone(case: tuple[tuple[int, int, int], int | None]) -> tuple[Sequences, torch.Tensor]:
    """Sequences of a layout and window, with all their rows computed alone."""
    layout, window = case
    assert torch.get_num_threads() == 1
    sequences = Sequences(layout, length=LENGTH, sliding_window=window)
    return sequences, sequences.alone()


def in_chunks(size: int, lane: int, sequence: int = 0) -> list[Part]:
    return [Part(lane, sequence, first, min(size, LENGTH - first)) for first in range(0, LENGTH, size)]


@each_case
def test_in_chunks_and_in_one_pass(case: tuple[tuple[int, int, int], int | None]) -> None:
    sequences, alone = computed_alone(case)
    for size in (7, 16, 64, 200, 512, LENGTH):
        lane = size % NUM_LANES
        sequences.fill([Part(lane, 0, 0, LENGTH)], stale=-3.0)
        for part in in_chunks(size, lane):
            assert torch.equal(sequences.attend([part]), of_parts(alone, [part])), f"{part}"


@each_case
def test_in_blocks_at_every_edge(case: tuple[tuple[int, int, int], int | None]) -> None:
    sequences, alone = computed_alone(case)
    sequences.fill([Part(0, 1, LENGTH, 0)])
    for size in range(2, 17):
        for edge in EDGES:
            # The last row of the block has `edge` slots to see.
            part = Part(0, 1, edge - size, size)
            assert torch.equal(sequences.attend([part]), of_parts(alone, [part])), f"{part}"


BATCHES = {
    "plain decoding at all edges, with gaps": [
        Part(lane, lane % 2, edge - 1, 1)
        for lane, edge in zip((0, 1, 2, 4, 5, 7, 8, 9), (EDGES[0], *EDGES[:7]), strict=True)
    ],
    "verification blocks of one length": [Part(lane, lane % 2, 200, 6) for lane in range(8)],
    "blocks of different lengths across an edge": [Part(9 - n, n % 2, 250 + n, n) for n in range(1, 9)],
    "prefill beside decoding": [
        Part(3, 0, 0, 200),
        Part(2, 1, 255, 1),
        Part(4, 1, 0, 97),
        Part(5, 0, 383, 5),
        Part(0, 1, 17, 300),
    ],
    "short contexts": [Part(lane, lane % 2, lane, 1 + lane % 3) for lane in range(8)],
    "neighbours of unlike length": [Part(0, 0, 20, 2), Part(1, 1, 500, 3), Part(2, 0, 21, 2), Part(3, 1, 127, 1)],
}


@each_case
def test_in_batches(case: tuple[tuple[int, int, int], int | None]) -> None:
    sequences, alone = computed_alone(case)
    for name, batch in BATCHES.items():
        for count in range(1, len(batch) + 1):
            parts = batch[:count]
            sequences.fill(parts, stale=7.0)
            assert torch.equal(sequences.attend(parts), of_parts(alone, parts)), f"{name}: first {count}"


@each_case
def test_on_two_threads(case: tuple[tuple[int, int, int], int | None]) -> None:
    sequences, alone = computed_alone(case)
    packs = [[part] for part in in_chunks(200, lane=0) + in_chunks(LENGTH, lane=0)]
    packs += [[Part(0, 1, edge - 6, 6)] for edge in EDGES]
    packs += BATCHES.values()
    torch.set_num_threads(2)
    for parts in packs:
        sequences.fill(parts, stale=7.0)
        assert torch.equal(sequences.attend(parts), of_parts(alone, parts)), f"{parts}"


@st.composite
def packs(draw: st.DrawFn) -> list[Part]:
    lanes = draw(st.permutations(range(NUM_LANES)))[: draw(st.integers(1, 8))]
    near_edges = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(edge - 8, min(edge + 8, LENGTH - 1)))
    parts = []
    for lane in lanes:
        first = draw(near_edges | st.integers(0, LENGTH - 1))
        most = LENGTH - first
        count = draw(st.integers(1, min(16, most)) | st.integers(1, most))
        parts.append(Part(lane, draw(st.integers(0, 1)), first, count))
    return parts


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(CASES), parts=packs())
def test_in_any_pack(case: tuple[tuple[int, int, int], int | None], parts: list[Part]) -> None:
    sequences, alone = computed_alone(case)
    sequences.fill(parts, stale=-1.0)
    assert torch.equal(sequences.attend(parts), of_parts(alone, parts))


@each_case
def test_row_by_row_in_a_pack_is_row_by_row_alone(case: tuple[tuple[int, int, int], int | None]) -> None:
    sequences, _ = computed_alone(case)
    for parts in (
        [Part(lane, lane % 2, 250 + lane, 6) for lane in range(4)],
        [Part(1, 1, 100, 60), Part(2, 0, 255, 2)],
    ):
        sequences.fill(parts)
        together = sequences.attend(parts, row_by_row=True)
        rows = [Part(p.lane, p.sequence, p.first + i, 1) for p in parts for i in range(p.count)]
        sequences.fill(parts)
        assert torch.equal(together, torch.cat([sequences.attend([row], row_by_row=True) for row in rows]))


def test_a_poisoned_neighbour_or_predecessor_changes_nothing() -> None:
    sequences, alone = computed_alone(((9, 3, 64), None))
    parts = [Part(lane, lane % 2, 150, 2) for lane in range(3)]
    sequences.fill(parts)
    for pool in (sequences.cache.keys(1), sequences.cache.values(1)):
        pool[3:6] = float("nan")
    together = sequences.attend(parts)
    assert torch.equal(together[0:2], alone[0, 150:152])
    assert together[2:4].isnan().all()
    assert torch.equal(together[4:6], alone[0, 150:152])
    sequences.cache.release(1)
    assert sequences.cache.allocate() == 1
    sequences.cache.reserve(1, LENGTH)
    assert torch.equal(sequences.attend([Part(1, 1, 0, 9)]), alone[1, :9])

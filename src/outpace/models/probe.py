"""Checks at start-up that a row's bits do not depend on its neighbours, and falls back where they do.

The promise of equal text rests on how this processor's kernels behave at this model's shapes with this number of
threads, so it is looked at and not assumed. All layers of a decoder have the same shapes: the first and the last
(which may have a sliding window) and the head stand for the rest.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from outpace.errors import CheckpointError
from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.models.decoder import Decoder, RowPath
from outpace.types import Segment

__all__ = ["ProbeReport", "probe_rows", "same_bits"]

Progress = Callable[[int, int], None]
"""Takes (packs computed, all packs)."""

_LOG = logging.getLogger(__name__)

_LONG = KEY_BLOCK + 16  # rows of the first lane: across an edge between key blocks
_ALONE_FROM = KEY_BLOCK - 8  # its rows from here on are compared
_SHORT = 9  # rows of the second lane, compared from its start

_Step = tuple[tuple[int, int, int], ...]
"""Parts (lane, first slot, end slot) of one pack."""

_ONE_BY_ONE: tuple[_Step, ...] = (
    ((0, 0, _ALONE_FROM),),
    *(((0, slot, slot + 1),) for slot in range(_ALONE_FROM, _LONG)),
    *(((1, slot, slot + 1),) for slot in range(_SHORT)),
)
_ARRANGEMENTS: tuple[tuple[_Step, ...], ...] = (
    (((0, 0, _LONG), (1, 0, _SHORT)),),
    (
        ((1, 0, 1), (0, 0, 97)),
        ((0, 97, _ALONE_FROM),),
        ((0, _ALONE_FROM, _ALONE_FROM + 2), (1, 1, 4)),
        ((0, _ALONE_FROM + 2, _ALONE_FROM + 5),),
        ((0, _ALONE_FROM + 5, _ALONE_FROM + 10), (1, 4, _SHORT)),
        ((0, _ALONE_FROM + 10, _LONG),),
    ),
)
_TREE_DEPTH = (_LONG - _ALONE_FROM) // 2  # a tree of right and wrong tokens fills the slots from there on


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Args:
        row_path: how the decoder computes rows from now on.
        passed: rows have the same bits in every pack on that path.
        changed: path tried -> comparisons of a row that came out different, in the order tried; 0 for the last
            if it passed.
        compared: comparisons made on each path: a row's hidden states, cache rows and logits in one arrangement.
        threads: threads in use.
        seconds: time taken.
        digest: of the numbers of all rows computed one at a time: another number of threads must give the same.
        trees: rows of a tree have the bits of their path on that path of rows.
    """

    row_path: RowPath
    passed: bool
    changed: dict[RowPath, int]
    compared: int
    threads: int
    seconds: float
    digest: bytes
    trees: bool = True

    def describe(self) -> str:
        """One to three sentences for people."""
        return self._rows() + ("" if self.trees else "; of a draft with branches one chain is verified")

    def _rows(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.row_path is RowPath.BLOCKS:
            return f"rows have the same bits in every pack ({self.compared} compared, {threads})"
        tried = "; ".join(f"{path.value}: {count} of {self.compared} differ" for path, count in self.changed.items())
        outcome = f"using: {self.row_path.value}" if self.passed else "speculation may change the text here"
        return f"rows depend on their neighbours on this machine ({threads}; {tried}); {outcome}"


@torch.inference_mode()
def probe_rows(decoder: Decoder, progress: Progress | None = None) -> ProbeReport:
    """Compares rows computed one at a time with the same rows in blocks, and sets `decoder.row_path`.

    Takes the fastest path that passes; if none does, the slowest. Logs a warning unless the fastest passes. On that
    path it looks at rows of a tree too, and sets `decoder.takes_trees`.

    Args:
        decoder: the model.
        progress: called with (packs computed, all packs) after each; begins anew on each path.

    Raises:
        CheckpointError: what the model computes is not finite: its weights are damaged, or beyond float32.
    """
    start = time.perf_counter()
    changed: dict[RowPath, int] = {}
    compared, digest = 0, b""
    for path in RowPath:
        decoder.row_path = path
        changed[path], compared, digest, trees = _count_changed(decoder, progress or _no_progress)
        if not changed[path]:
            break
    decoder.takes_trees = trees
    report = ProbeReport(
        row_path=decoder.row_path,
        passed=not changed[decoder.row_path],
        changed=changed,
        compared=compared,
        threads=torch.get_num_threads(),
        seconds=time.perf_counter() - start,
        digest=digest,
        trees=trees,
    )
    if report.row_path is not RowPath.BLOCKS:
        _LOG.warning("%s", report.describe())
    return report


@torch.inference_mode()
def same_bits(decoder: Decoder, report: ProbeReport) -> bool:
    """Whether the threads in use now give rows the bits they had in the report, in every pack."""
    changed, _, digest, trees = _count_changed(decoder, _no_progress)
    return not changed and digest == report.digest and (trees or not report.trees)


def _no_progress(done: int, total: int) -> None:
    """Takes progress nobody wants to see."""


def _count_changed(decoder: Decoder, progress: Progress) -> tuple[int, int, bytes, bool]:
    """(rows that came out different, rows compared, digest of the rows computed one at a time, trees are right)."""
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(decoder.vocab_size, (count,), generator=generator, dtype=torch.int64, device="cpu")
        for count in (_LONG, _SHORT)
    ]
    total, computed = len(_ONE_BY_ONE) + sum(map(len, _ARRANGEMENTS)) + 1, itertools.count(1)

    def step_done() -> None:
        progress(next(computed), total)

    alone = _compute(decoder, ids, _ONE_BY_ONE, step_done)
    if not all(bool(row.isfinite().all()) for row in alone):
        # Not a number equals nothing, itself included: the comparison below would blame the kernels.
        raise CheckpointError(
            "what the model computes is not finite (NaN or infinite logits): its weights are damaged "
            "or beyond what this precision holds, or its config.json belongs to another model"
        )
    changed = 0
    for arrangement in _ARRANGEMENTS:
        block = _compute(decoder, ids, arrangement, step_done)
        changed += sum(not torch.equal(one, other) for one, other in zip(alone, block, strict=True))
    digest = hashlib.blake2b(b"".join(row.numpy().tobytes() for row in alone)).digest()
    tree = _compute_tree(decoder, ids[0])
    step_done()
    trees = all(torch.equal(one, other) for one, other in zip(alone, tree, strict=False))
    return changed, len(alone) * len(_ARRANGEMENTS), digest, trees


def _compute(
    decoder: Decoder, ids: Sequence[torch.Tensor], steps: Sequence[_Step], step_done: Callable[[], None]
) -> list[torch.Tensor]:
    """All numbers of each compared row, concatenated: states after both layers, logits, keys and values."""
    cache = decoder.new_cache(len(ids), _LONG, _LONG + _SHORT)
    for lane_ids in ids:
        lane = cache.allocate()
        if lane is None or not cache.reserve(lane, len(lane_ids)):
            raise AssertionError("the probe's own cache is too small")
    found: dict[tuple[int, int], torch.Tensor] = {}
    layers = sorted({0, decoder.num_layers - 1})
    for step in steps:
        hidden, keys = _run_step(decoder, cache, ids, layers, step)
        wanted = [row for row, (lane, slot) in enumerate(keys) if lane == 1 or slot >= _ALONE_FROM]
        states = hidden[wanted]
        rows = torch.cat((states, decoder.logits(states)), -1) if wanted else states
        found.update(zip((keys[row] for row in wanted), rows, strict=True))
        step_done()
    return [torch.cat((found[lane, slot], *_cache_rows(cache, layers, lane, slot))) for lane, slot in sorted(found)]


def _compute_tree(decoder: Decoder, ids: torch.Tensor) -> list[torch.Tensor]:
    """The first compared rows of lane 0 again, as the right nodes of a tree with a wrong one before each of them."""
    cache = decoder.new_cache(1, _LONG, _LONG)
    lane = cache.allocate()
    if lane is None or not cache.reserve(lane, _LONG):
        raise AssertionError("the probe's own cache is too small")
    layers = sorted({0, decoder.num_layers - 1})
    _run_step(decoder, cache, [ids], layers, ((lane, 0, _ALONE_FROM),))
    right = [_ALONE_FROM + 2 * depth + 1 for depth in range(_TREE_DEPTH)]
    paths = [(*right[:depth], slot) for depth in range(_TREE_DEPTH) for slot in (right[depth] - 1, right[depth])]
    depths = torch.arange(_TREE_DEPTH, dtype=torch.int64, device="cpu").repeat_interleave(2)
    tokens = ids[_ALONE_FROM + depths]
    tokens[::2] = (tokens[::2] + 1) % decoder.vocab_size
    segment = Segment(lane, 0, len(paths), _ALONE_FROM, _ALONE_FROM, tuple(paths))
    hidden = decoder.embed(tokens)
    for layer in layers:
        hidden = decoder.run_layers(hidden, _ALONE_FROM + depths, (segment,), layer, layer + 1, cache)
    states = hidden[1::2]
    rows = torch.cat((states, decoder.logits(states)), -1)
    return [torch.cat((row, *_cache_rows(cache, layers, lane, slot))) for row, slot in zip(rows, right, strict=True)]


def _run_step(
    decoder: Decoder, cache: KvCache, ids: Sequence[torch.Tensor], layers: Sequence[int], step: _Step
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    segments, begin = [], 0
    for lane, first, end in step:
        segments.append(Segment(lane, begin, begin + end - first, first))
        begin += end - first
    positions = torch.cat([torch.arange(first, end, dtype=torch.int64, device="cpu") for _, first, end in step])
    hidden = decoder.embed(torch.cat([ids[lane][first:end] for lane, first, end in step]))
    for layer in layers:
        hidden = decoder.run_layers(hidden, positions, segments, layer, layer + 1, cache)
    return hidden, [(lane, slot) for lane, first, end in step for slot in range(first, end)]


def _cache_rows(cache: KvCache, layers: Sequence[int], lane: int, slot: int) -> Iterator[torch.Tensor]:
    heads = slice(lane * cache.num_kv_heads, (lane + 1) * cache.num_kv_heads)
    for layer in layers:
        yield cache.keys(layer)[heads, slot].reshape(-1)
        yield cache.values(layer)[heads, slot].reshape(-1)

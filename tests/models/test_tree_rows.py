"""Rows of a tree have the bits of their path as a chain: logits and cache, in every precision and way of rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outpace.kv.cache import KEY_BLOCK, KvCache
from outpace.models.decoder import Decoder, RowPath
from outpace.models.hf import TransformersModel
from outpace.models.hf_bits import probe_rows as probe_hf
from outpace.models.probe import probe_rows, same_bits
from outpace.types import Pack, Segment
from tests.models.hf_tiny import RIGHT, tiny_model
from tests.models.tiny_models import PRECISIONS, lanes, pack_of, random_ids, tiny_decoder
from tests.trees import chain_of, depths_of, random_parents, tree_segment

LENGTH = KEY_BLOCK + 60
TEXT = random_ids(LENGTH, 5)
Rows = dict[tuple[int, ...], list[torch.Tensor]]


def tree_pack(
    lane: int, fork: int, trunk: int, parents: Sequence[int], tokens: Sequence[int], before: Pack | None = None
) -> Pack:
    """The last `trunk` tokens of the text and a tree behind them, after the rows of another pack."""
    begin = 0 if before is None else before.num_rows
    segment = tree_segment(lane, begin, fork - trunk, trunk, parents)
    ids = torch.tensor([*TEXT[fork - trunk : fork], *tokens])
    positions = torch.tensor([*range(fork - trunk, fork), *(fork + depth for depth in depths_of(parents))])
    segments: tuple[Segment, ...] = (segment,)
    if before is not None:
        ids, positions = torch.cat((before.ids, ids)), torch.cat((before.positions, positions))
        segments = (*before.segments, segment)
    return Pack(ids, positions, segments, torch.arange(len(ids)))


def numbers(model: Decoder | TransformersModel, cache: KvCache, lane: int, slot: int, logits: torch.Tensor) -> list:
    heads = slice(lane * cache.num_kv_heads, (lane + 1) * cache.num_kv_heads)
    pools = [
        pool(layer)[heads, slot].clone() for layer in range(model.num_layers) for pool in (cache.keys, cache.values)
    ]
    return [logits, *pools]


def as_chains(model: Decoder | TransformersModel, fork: int, parents: Sequence[int], tokens: Sequence[int]) -> list:
    """All numbers of each node, computed as the last row of its path, row by row behind a text computed at once."""
    cache = lanes(model, 1, LENGTH)  # type: ignore[arg-type]
    if fork:
        model.forward(pack_of((0, 0, TEXT[:fork])), cache)
    found = []
    for node in range(len(parents)):
        for depth, each in enumerate(chain_of(parents, node)):
            logits = model.forward(pack_of((0, fork + depth, [tokens[each]])), cache).logits
        found.append(numbers(model, cache, 0, fork + depth, logits[0]))
    return found


def assert_tree_is_its_paths(model: Decoder | TransformersModel, seed: int, forks: Sequence[int]) -> None:
    source = random.Random(seed)
    for fork in forks:
        count = source.choice([2, 5, 11, 16])
        parents = random_parents(source, count)
        tokens = [source.randrange(model.vocab_size) for _ in parents]
        wanted = as_chains(model, fork, parents, tokens)
        trunk = min(fork, source.choice([0, 1, 3]))
        cache = lanes(model, 3, LENGTH)  # type: ignore[arg-type]
        if fork > trunk:
            model.forward(pack_of((2, 0, TEXT[: fork - trunk])), cache)
        beside = pack_of((0, 0, random_ids(source.choice([1, 40]), 9)), (1, 0, TEXT[:1])) if fork % 2 else None
        pack = tree_pack(2, fork, trunk, parents, tokens, beside)
        logits = model.forward(pack, cache).logits[-count:]
        for node in range(count):
            found = numbers(model, cache, 2, fork + node, logits[node])
            same = [torch.equal(one, other) for one, other in zip(found, wanted[node], strict=True)]
            assert all(same), (fork, parents, node, same)


FORKS = (0, 3, KEY_BLOCK - 9, KEY_BLOCK - 2, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, KEY_BLOCK + 30)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2-window", "qwen3", "mistral-window"])
@pytest.mark.usefixtures("one_thread")
def test_decoders(variant: str, quantization: str, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_tree_is_its_paths(tiny_decoder(variant, quantization), len(variant) + threads, FORKS)


@pytest.mark.parametrize("path", [RowPath.ROW_ATTENTION, RowPath.SINGLE_ROWS])
@pytest.mark.parametrize("quantization", ["torch none", "torch int8", "none"])
@pytest.mark.usefixtures("one_thread")
@pytest.mark.thinned(2)
def test_slower_paths(path: RowPath, quantization: str) -> None:
    decoder = tiny_decoder("qwen2-window", quantization)
    decoder.row_path = path
    assert_tree_is_its_paths(decoder, 3, (5, KEY_BLOCK - 4, KEY_BLOCK))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.usefixtures("one_thread")
def test_models_on_transformers_layers(kind: str) -> None:
    """Each kind either has the bits, or has been found out and gets chains."""
    model = TransformersModel(tiny_model(kind))
    report = probe_hf(model)
    assert report.passed
    assert model.takes_trees is report.trees is True
    assert_tree_is_its_paths(model, len(kind), (6, KEY_BLOCK - 3))


@pytest.mark.usefixtures("one_thread")
def test_the_probe_finds_a_model_that_looks_at_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that are lost on the way to the kernels: rows of chains are right, and trees are not verified."""
    decoder = tiny_decoder("llama", "torch none")
    report = probe_rows(decoder)
    assert decoder.takes_trees and report.trees and "chain" not in report.describe()
    run = decoder.layers.run

    def without_paths(hidden: torch.Tensor, rope: torch.Tensor, segments: Sequence[Segment], *rest: object) -> object:
        bare = [Segment(s.lane, s.begin, s.end, s.first_slot) for s in segments]
        return run(hidden, rope, bare, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder.layers, "run", without_paths)
    assert not same_bits(decoder, report)
    report = probe_rows(decoder)
    assert report.passed and report.row_path is RowPath.BLOCKS
    assert not decoder.takes_trees and not report.trees and "chain" in report.describe()
    assert same_bits(decoder, report)


@pytest.mark.parametrize("quantization", ["none", "torch int8"])
@pytest.mark.usefixtures("one_thread")
def test_a_compacted_cache_is_that_of_the_path(quantization: str) -> None:
    """After the accepted path has moved to the front, what follows has the bits it has behind plain decoding."""
    decoder = tiny_decoder("qwen3", quantization)
    fork, parents = KEY_BLOCK - 3, [-1, -1, 0, 1, 1, 4, 3, 5]
    tokens, path = random_ids(8, 2), [1, 4, 5, 7]
    cache = lanes(decoder, 1, LENGTH)
    decoder.forward(pack_of((0, 0, TEXT[:fork])), cache)
    decoder.forward(tree_pack(0, fork, 0, parents, tokens), cache)
    cache.compact(0, fork, [fork + node for node in path])
    cache.truncate(0, fork + len(path))
    assert cache.reserve(0, LENGTH)
    following = decoder.forward(pack_of((0, fork + len(path), [9, 8])), cache).logits
    plain = lanes(decoder, 1, LENGTH)
    decoder.forward(pack_of((0, 0, [*TEXT[:fork], *(tokens[node] for node in path)])), plain)
    assert torch.equal(decoder.forward(pack_of((0, fork + len(path), [9, 8])), plain).logits, following)

"""All numbers of the rows of a request, computed in packs of any sizes, alone or beside others, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outpace.kv.cache import KEY_BLOCK
from outpace.models.decoder import Decoder
from tests.models.tiny_models import lanes, pack_of, random_ids

LENGTH = 2 * KEY_BLOCK + 5
IDS = random_ids(LENGTH, 1)
NEIGHBOURS = {1: random_ids(97, 2), 2: random_ids(LENGTH, 3)}


def cut(sizes: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < length:
        for size in sizes:
            yield begin, min(begin + size, length)
            begin += size
            if begin >= length:
                return


def compute(decoder: Decoder, sizes: Sequence[int], length: int, *, neighbours: bool = False) -> list[torch.Tensor]:
    """Every layer's states, the logits and all cache rows of the first `length` positions of IDS, [length, ...]."""
    layers = tuple(range(decoder.num_layers + 1))
    cache = lanes(decoder, 3, LENGTH)
    rows: list[list[torch.Tensor]] = []
    for step, (begin, end) in enumerate(cut(sizes, length)):
        parts = [(0, begin, IDS[begin:end])]
        if neighbours:
            if step == 0:
                parts.append((1, 0, NEIGHBOURS[1]))  # a prefill beside it
            parts.insert(step % 2, (2, step, NEIGHBOURS[2][step : step + 1]))  # a request decoding one by one
        first = sum(len(ids) for lane, _, ids in parts[: [lane for lane, _, _ in parts].index(0)])
        result = decoder.forward(pack_of(*parts, aux_layers=layers), cache)
        mine = slice(first, first + end - begin)
        rows.append([result.logits[mine], *(result.aux[layer][mine] for layer in layers)])
    joined = [torch.cat(pieces) for pieces in zip(*rows, strict=True)]
    heads = slice(0, cache.num_kv_heads)
    for layer in range(decoder.num_layers):
        joined.append(cache.keys(layer)[heads, :length].transpose(0, 1))
        joined.append(cache.values(layer)[heads, :length].transpose(0, 1))
    return joined


def assert_same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) == 2 + 3 * 4
    for one, other in zip(found, wanted, strict=True):
        differing = (one != other).flatten(1).any(1).nonzero().flatten().tolist()
        assert differing == []

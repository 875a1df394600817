"""Random trees, and the segments that verify them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outpace.types import Segment

__all__ = ["chain_of", "depths_of", "random_parents", "tree_segment"]


def random_parents(source: random.Random, count: int) -> list[int]:
    """Parents of `count` nodes: bushes, chains, combs, and anything between."""
    reach = source.choice([1, 2, 4, count])
    return [max(-1, node - source.randint(1, reach)) if source.random() < 0.95 else -1 for node in range(count)]


def depths_of(parents: Sequence[int]) -> list[int]:
    """0 for a child of the text."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def chain_of(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the text to this one, itself included."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


def tree_segment(lane: int, begin: int, first_slot: int, trunk: int, parents: Sequence[int]) -> Segment:
    """`trunk` rows of the text from `first_slot` on, then a tree behind them, every node with a path of its own."""
    fork = first_slot + trunk
    paths = tuple(tuple(fork + each for each in chain_of(parents, node)) for node in range(len(parents)))
    return Segment(lane, begin, begin + trunk + len(parents), first_slot, fork, paths)

"""Drafts with branches in the simulated world."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.decisions import Offer, Selection, VerifiedOffer

__all__ = ["ALIKE", "Tree", "best_tree", "grow"]

ALIKE = (0.5, 0.4, 0.3, 0.3, 0.3)
"""What a drafter that knows nothing says of its first, second, ... candidate, of what those before it leave."""

_EXPANSIONS = 3
"""Nodes that get children in one pass of a drafter."""


@dataclass
class Tree:
    """One draft, of which `nodes` are left. All lists go by the nodes of the whole draft, children in order.

    Args:
        true: chance of a node if its parent is kept.
        passes: of the drafter.
    """

    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    true: list[float] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    passes: int = 0

    @property
    def survival(self) -> list[float]:
        """True ones of the nodes that are left."""
        found: list[float] = []
        for parent, chance in zip(self.parents, self.true, strict=True):
            found.append(chance * (found[parent] if parent >= 0 else 1.0))
        return [found[node] for node in self.nodes]

    @property
    def num_branches(self) -> int:
        """Nodes left that are not the first of their siblings in the whole draft."""
        return sum(self.parents[node] in self.parents[:node] for node in self.nodes)

    def whole(self, request: int, name: str) -> Offer:
        """All of it."""
        parents = tuple(self.parents)
        return Offer(request, name, len(parents), tuple(self.said), parents=parents)

    def offer(self, request: int, name: str) -> Offer:
        """What is left of it."""
        place = {-1: -1, **{node: index for index, node in enumerate(self.nodes)}}
        parents = tuple(place[self.parents[node]] for node in self.nodes)
        said = tuple(self.said[node] for node in self.nodes)
        # A chain that is left of a tree is still offered as a tree here, which is allowed and simpler.
        return Offer(request, name, len(parents), said, parents=parents)

    def cut(self, kept: Selection) -> None:
        """Leaves these of the nodes that were left."""
        chosen = range(kept) if isinstance(kept, int) else kept
        assert list(chosen) == sorted(set(chosen)) and all(0 <= place < len(self.nodes) for place in chosen)
        self.nodes = [self.nodes[place] for place in chosen]
        assert all(self.parents[node] in (-1, *self.nodes) for node in self.nodes), "a node without its parent"

    def verified(self, rng: np.random.Generator, request: int, name: str) -> VerifiedOffer:
        """Draws what comes, along the whole draft as far as it is verified and one token further."""
        followed: list[int] = []
        at = -1
        while at < 0 or at in self.nodes:
            draw, right = rng.random(), None
            for node, parent in enumerate(self.parents):
                if parent == at:
                    if draw < self.true[node]:
                        right = node
                        break
                    draw -= self.true[node]
            if right is None:
                break
            followed.append(right)
            at = right
        count = sum(node in self.nodes for node in followed)
        return VerifiedOffer(self.offer(request, name), count, self.whole(request, name), tuple(followed))


def grow(world: Any, drafter: Any, request: int, name: str, most: int, stop_below: float, width: int) -> Tree:
    """As drafters do: the best nodes get children, as long as these may be among the best."""
    tree = Tree()
    hoped: list[float] = []
    waiting, expanded = [-1], {-1}
    while waiting:
        tree.passes += 1
        for node in waiting:
            alive = hoped[node] if node >= 0 else 1.0
            for true, said, kept in _children(world, drafter, request, name, tree, node, width):
                tree.parents.append(node)
                tree.depths.append(tree.depths[node] + 1 if node >= 0 else 0)
                tree.true.append(true)
                tree.said.append(said)
                hoped.append(alive * kept)
        order = sorted(range(len(hoped)), key=lambda node: (-hoped[node], node))[:most]
        open_to = order[:-1] if len(order) == most else order
        waiting = [node for node in open_to if node not in expanded and hoped[node] >= stop_below][:_EXPANSIONS]
        expanded.update(waiting)
    return _reordered(tree, order)


def _children(
    world: Any, drafter: Any, request: int, name: str, tree: Tree, node: int, width: int
) -> list[tuple[float, float, float]]:
    """(true chance, what is said, what the controller makes of it) of every child, if the parent is kept."""
    depth = tree.depths[node] + 1 if node >= 0 else 0
    chances = [drafter.chance(request, depth), *drafter.ranks()][:width]
    left, said_left = 1.0, 1.0
    said: list[float] = []
    found = []
    for rank, average in enumerate(chances):
        share = average
        told = ALIKE[rank]
        if drafter.informative and 0.0 < average < 1.0:
            share = told = float(world.rng.beta(1.5 * average, 1.5 * (1 - average)))
        if drafter.overstated:
            told = told**0.4
        confidence = min(1.0, told * said_left)
        kept = confidence  # one that looks things up asks nobody
        if drafter.round_seconds is not None:
            kept = world.controller.calibrated(request, name, depth, confidence, said[:])
        said.append(confidence)
        found.append((left * share, confidence, kept))
        left *= 1.0 - share
        said_left = max(0.0, said_left - confidence)
    return found


def _reordered(tree: Tree, order: Sequence[int]) -> Tree:
    place = {-1: -1, **{node: index for index, node in enumerate(order)}}
    return Tree(
        parents=[place[tree.parents[node]] for node in order],
        depths=[tree.depths[node] for node in order],
        true=[tree.true[node] for node in order],
        said=[tree.said[node] for node in order],
        nodes=list(range(len(order))),
        passes=tree.passes,
    )


def best_tree(seconds: Callable[[int], float], drafter: Any, requests: Sequence[int], most: int) -> float:
    """Tokens per second of the best fixed tree, the same for every request: by its nodes and its depth."""
    batch, request = len(requests), requests[0]
    best = 0.0
    for depth in range(1, most + 1):
        survival = _best_nodes(drafter, request, most, depth)
        drafting = depth * drafter.wide * drafter.round_seconds(batch) if drafter.round_seconds is not None else 0.0
        if drafter.round_seconds is not None:
            drafting += batch * drafter.row_seconds
        tokens = 1.0
        for count, chance in enumerate(survival, 1):
            tokens += chance
            best = max(best, batch * tokens / (seconds(batch * (1 + count)) + drafting))
    return best


def _best_nodes(drafter: Any, request: int, most: int, depth: int) -> list[float]:
    """Falling chances of the best nodes down to a depth."""
    found: list[float] = []
    heap = [(-chance, 0) for chance in _expanded(drafter, request, 1.0, 0)]
    heapq.heapify(heap)
    while heap and len(found) < most:
        negative, at = heapq.heappop(heap)
        found.append(-negative)
        if at + 1 < depth:
            for chance in _expanded(drafter, request, -negative, at + 1):
                heapq.heappush(heap, (-chance, at + 1))
    return found


def _expanded(drafter: Any, request: int, alive: float, depth: int) -> list[float]:
    left, found = alive, []
    for chance in (drafter.chance(request, depth), *drafter.ranks()):
        found.append(left * chance)
        left *= 1.0 - chance
    return found

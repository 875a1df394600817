"""A draft that branches while it grows: the most likely tokens are looked at first, and the best of them are kept.

The chance that a node is kept is the product of the chances on its path (Li et al. "EAGLE-2" 2406.16858). In every pass
of the draft model the best nodes that have no children yet get them, as long as their children could be among the best
`limit` nodes. So a sure continuation becomes a chain and an unsure one a bush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outpace.drafters.siblings import siblings
from outpace.types import Ask, Draft

__all__ = ["TreeGrowth"]


@dataclass(slots=True, kw_only=True)
class TreeGrowth:
    """One request's draft, drawn with the target's own noise.

    Args:
        ask: what it is made for.
        limit: most nodes that are kept.
        width: most children of a node.
        ids: of the nodes found so far, parents before children.
        parents: index of each node's parent, -1 for a child of the committed text.
        paths: tokens from the text to each node, itself included.
        confidence: what the draft model makes of each node: the chance that it is kept if its parent is.
        survival: the chance that it is kept, as far as the one who asks can tell.
        expanded: nodes that were given their children, -1 among them.
    """

    ask: Ask
    limit: int
    width: int
    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)

    def expand(self, node: int, logits: torch.Tensor) -> None:
        """Gives a node (-1: the committed text) its children, from the draft model's logits [V] behind it."""
        self.expanded.add(node)
        path, survival = (self.paths[node], self.survival[node]) if node >= 0 else ((), 1.0)
        found = siblings(logits, self.ask.choice(path), self.width)
        said = [sibling.chance for sibling in found]
        for place, (token, chance) in enumerate(found):
            kept = chance if self.ask.chance is None else self.ask.chance(len(path), chance, said[:place])
            self.ids.append(token)
            self.parents.append(node)
            self.paths.append((*path, token))
            self.confidence.append(chance)
            self.survival.append(survival * kept)

    def best(self) -> list[int]:
        """The nodes that would be kept, the most likely first, so that the first n are the best n."""
        return sorted(range(len(self.ids)), key=lambda node: (-self.survival[node], node))[: self.limit]

    def to_expand(self, most: int) -> list[int]:
        """At most so many nodes whose children may be among the best, the most likely first; none when it is done."""
        best = self.best()
        if len(best) == self.limit:
            best.pop()  # children of the least likely are no more likely
        return [node for node in best if node not in self.expanded and self._is_worth_more(node)][:most]

    def _is_worth_more(self, node: int) -> bool:
        """Whether its children can pay."""
        return self.survival[node] >= self.ask.stop_below and self.ids[node] not in self.ask.stop_ids

    def draft(self, source: str, nodes: Sequence[int] | None = None) -> Draft:
        """The best nodes; empty if there are none.

        Args:
            source: where they come from, for people.
            nodes: the same in another order, parents before children.
        """
        nodes = self.best() if nodes is None else nodes
        place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
        return Draft(
            ids=tuple(self.ids[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            sources=(source,) * len(nodes),
            confidence=tuple(self.confidence[node] for node in nodes),
        )

"""What the nodes of a draft with branches are worth, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outpace.control.acceptance import Correction, DrafterAcceptance, Outcome
from outpace.control.ranks import share_of
from outpace.decisions import Offer, Selection, VerifiedOffer

__all__ = ["Ranked", "learn", "ranked", "selected", "sibling_chance", "size"]


class Ranked(NamedTuple):
    """The tokens of a draft in the order of their chances, parents before children.

    Args:
        survival: falling chances that a token and all before it on its path are kept.
        order: whose they are; None for a chain, whose tokens are in order.
        spine: chances of the first child of the text, its first child, and so on.
    """

    survival: list[float]
    order: list[int] | None
    spine: list[float]


class _Place:
    """The children of a node so far: how likely it is, what they leave, and what the drafter says they leave."""

    __slots__ = ("alive", "depth", "first", "last", "left", "rank", "said_left")

    def __init__(self, alive: float, depth: int) -> None:
        self.alive, self.depth = alive, depth
        self.left = self.said_left = self.last = 1.0
        self.rank, self.first = 0, 0.0

    def next(self, acceptance: DrafterAcceptance, own: Correction, said: float | None) -> float:
        """The chance of the next child, if the node is kept: no more than that of the one before it."""
        if not self.rank:
            chance = acceptance.chance(self.depth, said, own)
            self.first = said or 0.0
        elif said is None:
            chance = acceptance.ranks.average(self.rank)
        else:
            chance = acceptance.ranks.chance(self.rank, self.first, share_of(said, self.said_left))
        found = self.last = min(self.left * chance, self.last)
        self.left *= 1.0 - chance
        self.said_left -= said or 0.0
        self.rank += 1
        return found


def sibling_chance(
    acceptance: DrafterAcceptance, own: Correction, position: int, confidence: float, before: Sequence[float]
) -> float:
    """That a token is kept if those on its path are, `before` being what the drafter says of the siblings before it."""
    place = _Place(1.0, position)
    for said in before:
        place.next(acceptance, own, said)
    return place.next(acceptance, own, confidence)


def ranked(acceptance: DrafterAcceptance, own: Correction, offer: Offer) -> Ranked:
    """The nodes of a draft with branches by their chances."""
    assert offer.parents is not None
    confidence = offer.confidence
    places = {-1: _Place(1.0, 0)}
    survival: list[float] = []
    spine: list[float] = []
    tip = -1
    for node, parent in enumerate(offer.parents):
        place = places.get(parent)
        if place is None:
            place = places[parent] = _Place(survival[parent], places[offer.parents[parent]].depth + 1)
        if parent == tip and not place.rank:
            tip = node
        survival.append(place.alive * place.next(acceptance, own, None if confidence is None else confidence[node]))
        if tip == node:
            spine.append(survival[node])
    order = sorted(range(len(survival)), key=lambda node: (-survival[node], node))
    return Ranked([survival[node] for node in order], order, spine)


def selected(order: Sequence[int] | None, count: int) -> Selection:
    """The first `count` nodes of an order; of a chain, or where they come first anyway, their number says which."""
    if order is None or count in (0, len(order)):
        return count
    nodes = tuple(sorted(order[:count]))
    return count if nodes[-1] == count - 1 else nodes


def size(selection: Selection) -> int:
    """How many tokens these are."""
    return selection if isinstance(selection, int) else len(selection)


def learn(acceptance: DrafterAcceptance, own: Correction, seen: VerifiedOffer) -> Outcome:
    """Learns about ranks from a draft that may have branches. Returns what became of the first candidates of it.

    The whole draft counts, not what of it was verified: what the text went along is known all the same.
    """
    if seen.whole is None:
        offer = seen.offer
        return offer.num_tokens, min(seen.num_accepted, offer.num_tokens), offer.confidence, own, ()
    whole, followed = seen.whole, seen.followed
    assert whole.parents is not None
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(whole.parents):
        children.setdefault(parent, []).append(node)
    firsts: list[float] = []
    missed: list[int] = []
    for depth, at in enumerate((-1, *followed)):
        candidates = children.get(at)
        if candidates is None:
            break
        right = candidates.index(followed[depth]) if depth < len(followed) else None
        said = None if whole.confidence is None else [whole.confidence[node] for node in candidates]
        acceptance.ranks.observe(said, len(candidates), right)
        firsts.append(0.0 if said is None else said[0])
        if right:
            missed.append(depth)
    return len(firsts), len(followed), None if whole.confidence is None else firsts, own, missed

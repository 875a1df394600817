"""What nodes of a tree are worth, which are taken, and what is learnt from them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outpace.control.acceptance import DrafterAcceptance
from outpace.control.branches import learn, ranked, selected, sibling_chance, size
from outpace.control.branching import row_price
from outpace.control.widths import BranchGain, gain_of
from outpace.decisions import Offer, VerifiedOffer

from ..trees import chain_of, depths_of, random_parents


def offer_of(parents: Sequence[int], confidence: Sequence[float] | None = None) -> Offer:
    said = None if confidence is None else tuple(confidence)
    return Offer(1, "x", len(parents), said, parents=tuple(parents))


def random_offer(source: random.Random, count: int, *, speaks: bool) -> Offer:
    parents = random_parents(source, count)
    said = [round(source.random() * 0.5, 3) for _ in parents] if speaks else None
    return offer_of(parents, said)


def experienced(source: random.Random) -> DrafterAcceptance:
    """Has seen drafts of every kind."""
    acceptance = DrafterAcceptance()
    own = acceptance.correction()
    for _ in range(60):
        whole = random_offer(source, 8, speaks=True)
        node, followed = -1, []
        for _ in range(source.randint(0, 3)):
            assert whole.parents is not None
            children = [each for each, parent in enumerate(whole.parents) if parent == node]
            if not children:
                break
            node = source.choice(children)
            followed.append(node)
        acceptance.observe([learn(acceptance, own, VerifiedOffer(whole, 0, whole, tuple(followed)))])
    return acceptance


@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_chances_are_products_along_paths_of_what_siblings_leave(seed: int, speaks: bool) -> None:
    source = random.Random(seed)
    acceptance = experienced(source)
    own = acceptance.correction()
    offer = random_offer(source, 12, speaks=speaks)
    found = ranked(acceptance, own, offer)
    parents = offer.parents
    assert parents is not None and found.order is not None
    depths = depths_of(parents)
    for chance, node in zip(found.survival, found.order, strict=True):
        expected = 1.0
        for each in chain_of(parents, node):
            before = [other for other in range(each) if parents[other] == parents[each]]
            if offer.confidence is not None:
                said = [offer.confidence[other] for other in before]
                expected *= sibling_chance(acceptance, own, depths[each], offer.confidence[each], said)
            else:
                left = 1.0
                steps = [acceptance.chance(depths[each], None, own)]
                steps += [acceptance.ranks.average(rank) for rank in range(1, 1 + len(before))]
                best = 1.0
                for step in steps:
                    best = min(best, left * step)
                    left *= 1.0 - step
                expected *= best
        assert chance == pytest.approx(expected)
    assert found.survival == sorted(found.survival, reverse=True)
    place = {node: index for index, node in enumerate(found.order)}
    assert all(parents[node] < 0 or place[parents[node]] < place[node] for node in found.order)
    first = next((node for node, parent in enumerate(parents) if parent < 0), None)
    assert (found.spine[0] if found.spine else None) == (None if first is None else found.survival[place[first]])


def test_siblings_come_in_the_order_of_the_drafter() -> None:
    """Else the second candidate would be taken for the first one when what became of it is learnt."""
    acceptance = DrafterAcceptance()
    own = acceptance.correction()
    for _ in range(80):  # the first is always wrong, the second always right
        whole = offer_of((-1, -1), (0.5, 0.3))
        acceptance.observe([learn(acceptance, own, VerifiedOffer(whole, 1, whole, (1,)))])
    found = ranked(acceptance, own, offer_of((-1, -1), (0.5, 0.3)))
    assert found.order == [0, 1]


def test_which_nodes_a_number_of_them_are() -> None:
    assert selected(None, 3) == 3
    assert selected([0, 2, 1], 0) == 0
    assert selected([0, 2, 1], 1) == 1
    assert selected([0, 2, 1], 2) == (0, 2)
    assert selected([0, 2, 1], 3) == 3
    assert size((0, 2)) == 2 and size(5) == 5


def test_a_token_is_known_to_be_right_though_nobody_verified_it() -> None:
    """The whole draft teaches, whatever was cut: here all siblings were, and the text went along one of them."""
    cut, whole = Offer(1, "x", 1, (0.5,)), offer_of((-1, -1, -1), (0.5, 0.3, 0.1))
    acceptance = DrafterAcceptance()
    own = acceptance.correction()
    before = acceptance.chance(0, 0.5, own), acceptance.ranks.chance(1, 0.5, 0.6)
    for _ in range(10):
        outcome = learn(acceptance, own, VerifiedOffer(cut, 0, whole, (1,)))
        assert outcome == (1, 1, [0.5], own, [0])
        acceptance.observe([outcome])
    assert acceptance.chance(0, 0.5, own) < before[0]
    assert acceptance.ranks.chance(1, 0.5, 0.6) > before[1]


def test_first_candidates_along_the_way_are_learnt_like_a_chain() -> None:
    whole = offer_of((-1, 0, -1, 1, 2), (0.9, 0.8, 0.05, 0.7, 0.6))
    acceptance = DrafterAcceptance()
    own = acceptance.correction()
    assert learn(acceptance, own, VerifiedOffer(whole, 2, whole, (0, 1))) == (3, 2, [0.9, 0.8, 0.7], own, [])
    assert learn(acceptance, own, VerifiedOffer(whole, 2, whole, (2, 4))) == (2, 2, [0.9, 0.6], own, [0])
    assert learn(acceptance, own, VerifiedOffer(whole, 0, whole, ())) == (1, 0, [0.9], own, [])


def test_the_gain_of_a_tree_is_what_its_tokens_are_worth_beyond_their_rows() -> None:
    tree, spine = [0.6, 0.36, 0.24, 0.1], [0.6, 0.36]
    assert gain_of(tree, spine, 0.1) == pytest.approx(0.14)
    assert gain_of(tree, spine, 0.3) == 0.0
    # A chain would have gone on, with a token worth 0.2 less 0.1 for its row and 0.05 for drafting it.
    assert gain_of(tree, spine, 0.1, more=[0.2, 0.12], call=0.05) == pytest.approx(0.14 - 0.05)


def test_the_price_of_a_row_is_taken_from_around() -> None:
    seconds = [1.0, 1.0, 1.4, 1.4, 1.8, 1.8]
    assert row_price(seconds, 2, tokens=2.8, total=1.4) == pytest.approx(0.2 * 2.0)
    assert row_price([1.0], 0, tokens=1.0, total=1.0) == 0.0


def test_gains_are_kept_apart_by_the_size_of_the_batch() -> None:
    gains = BranchGain()
    for _ in range(20):
        gains.add(1, 0.3)
        gains.add(8, -0.1)
    assert gains.expected(1) == pytest.approx(0.3) and gains.expected(8) == pytest.approx(-0.1)
    assert gains.expected(32) is None
    gains.add(32, 0.5)
    assert gains.expected(32) is None, "one draft says little"

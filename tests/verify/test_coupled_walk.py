"""The walk: exact outcomes, and the recursive reference on every small tree."""

from __future__ import annotations

import itertools
import random

import pytest

from outpace.types import Draft, Verdict
from outpace.verify.coupled import verify
from outpace.verify.reference import verify_reference


def tree(ids: tuple[int, ...], parents: tuple[int, ...]) -> Draft:
    return Draft(ids=ids, parents=parents, sources=("test",) * len(ids))


@pytest.mark.parametrize(
    ("draft", "chosen", "accepted", "bonus"),
    [
        (Draft(), [7], (), 7),
        (Draft.chain([5], "x"), [5, 8], (0,), 8),
        (Draft.chain([5], "x"), [6, 8], (), 6),
        (Draft.chain([5, 6, 7], "x"), [5, 6, 7, 8], (0, 1, 2), 8),
        (Draft.chain([5, 6, 7], "x"), [5, 6, 9, 8], (0, 1), 9),
        (Draft.chain([5, 6, 7], "x"), [4, 6, 7, 8], (), 4),  # agreement after a rejection counts for nothing
        (tree((5, 6, 7, 8), (-1, -1, 0, 1)), [6, 1, 8, 2, 3], (1, 3), 3),
        (tree((5, 6, 7, 8), (-1, -1, 0, 1)), [5, 8, 7, 2, 3], (0,), 8),  # 8 is a child of the other branch
        (tree((5, 5, 7, 7), (-1, -1, 1, 0)), [5, 7, 7, 1, 2], (0, 3), 2),  # of equal siblings the first counts
        (tree((5, 5, 7), (-1, -1, 1)), [5, 7, 7, 1], (0,), 7),
        (tree((1, 1, 1), (-1, 0, 1)), [1, 1, 1, 1], (0, 1, 2), 1),
        (tree((2, 3, 4, 5), (-1, 0, 0, 2)), [2, 4, 9, 5, 6], (0, 2, 3), 6),
    ],
)
def test_outcome(draft: Draft, chosen: list[int], accepted: tuple[int, ...], bonus: int) -> None:
    assert verify(draft, chosen) == Verdict(accepted, bonus)
    assert verify_reference(draft, chosen) == Verdict(accepted, bonus)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4])
def test_every_small_tree_agrees_with_the_reference(size: int) -> None:
    for parents in itertools.product(*(range(-1, node) for node in range(size))):
        for ids in itertools.product((0, 1), repeat=size):
            draft = tree(ids, parents)
            for chosen in itertools.product((0, 1), repeat=size + 1):
                assert verify(draft, chosen) == verify_reference(draft, chosen)


def test_random_trees_agree_with_the_reference() -> None:
    rng = random.Random(0)
    depths = set()
    for _ in range(3000):
        size = rng.randrange(1, 40)
        parents = tuple(rng.randrange(max(-1, node - 4), node) for node in range(size))
        draft = tree(tuple(rng.randrange(3) for _ in range(size)), parents)
        chosen = [rng.randrange(3) for _ in range(size + 1)]
        verdict = verify(draft, chosen)
        assert verdict == verify_reference(draft, chosen)
        depths.add(len(verdict.accepted))
    assert depths >= set(range(6))


@pytest.mark.parametrize("chosen", [[], [5], [5, 6, 7]])
def test_wrong_number_of_chosen_tokens_is_an_error(chosen: list[int]) -> None:
    with pytest.raises(ValueError, match="draft of 1"):
        verify(Draft.chain([5], "x"), chosen)

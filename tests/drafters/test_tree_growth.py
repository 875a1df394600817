"""Trees grow where they are likely to be kept, and what is given back are the best nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outpace.drafters.fed_rows import FedRows
from outpace.drafters.tree_growth import TreeGrowth
from outpace.params import SamplingDefaults, SamplingParams
from outpace.types import Ask

GREEDY = SamplingParams(temperature=0.0).resolved(SamplingDefaults())
ASK = Ask(request_id=0, token_ids=[5, 6], num_draft_tokens=6, params=GREEDY, seed=0, number=0, lane=0)


def logits_of(path: tuple[int, ...], vocab_size: int = 8) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(hash(path) % 2**31)) * 2


def grown(growth: TreeGrowth, breadth: int) -> int:
    """Expands a tree to its end. Returns the passes it took."""
    growth.expand(-1, logits_of(()))
    for passes in itertools.count(1):
        nodes = growth.to_expand(breadth)
        if not nodes:
            return passes
        assert len(nodes) <= breadth
        for node in nodes:
            growth.expand(node, logits_of(growth.paths[node]))
    raise AssertionError


def best_paths(limit: int, width: int) -> dict[tuple[int, ...], float]:
    """The most likely paths among all, by looking at all of them."""
    found: dict[tuple[int, ...], float] = {}
    level = {(): 1.0}
    for _ in range(limit):
        following: dict[tuple[int, ...], float] = {}
        for path, survival in level.items():
            chances = logits_of(path).softmax(0)
            for token in chances.argsort(descending=True)[:width].tolist():
                following[(*path, token)] = survival * float(chances[token])
        found |= following
        level = dict(sorted(following.items(), key=lambda item: -item[1])[:limit])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:limit])


@pytest.mark.parametrize("breadth", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2, 6, 13])
def test_the_best_nodes_are_found_whatever_the_breadth(limit: int, width: int, breadth: int) -> None:
    growth = TreeGrowth(ask=ASK, limit=limit, width=width)
    grown(growth, breadth)
    draft = growth.draft("x")
    found = [tuple(draft.ids[node] for node in path) for path in draft.paths]
    wanted = best_paths(limit, width)
    assert set(found) == set(wanted)
    assert draft.confidence is not None
    survival = [math.prod(draft.confidence[node] for node in path) for path in draft.paths]
    assert survival == pytest.approx(list(wanted.values()), rel=1e-5)
    assert draft.sources == ("x",) * limit


def test_one_wide_is_a_chain_of_as_many_passes_as_tokens() -> None:
    growth = TreeGrowth(ask=ASK, limit=6, width=1)
    assert grown(growth, 4) == 6
    assert growth.draft("x").is_chain and len(growth.ids) == 6


def test_the_end_of_a_text_gets_no_children() -> None:
    whole = TreeGrowth(ask=ASK, limit=6, width=2)
    grown(whole, 2)
    first = whole.ids[0]
    assert any(path[0] == first and len(path) > 1 for path in whole.paths)
    growth = TreeGrowth(ask=replace(ASK, stop_ids=frozenset({first})), limit=6, width=2)
    grown(growth, 2)
    assert len(growth.best()) == 6
    assert growth.ids.count(first) and not any(first in path[:-1] for path in growth.paths)


def test_nodes_that_are_hardly_kept_get_no_children() -> None:
    """The one who asks says how likely a token is kept and where it is not worth going on."""
    heard: list[tuple[int, float]] = []

    def chance(position: int, confidence: float, before: Sequence[float]) -> float:
        heard.append((position, confidence))
        return 0.5

    growth = TreeGrowth(ask=replace(ASK, stop_below=0.2, chance=chance), limit=30, width=2)
    grown(growth, 4)
    assert sorted(growth.survival) == [0.125] * 8 + [0.25] * 4 + [0.5] * 2
    assert {position for position, _ in heard} == {0, 1, 2}
    assert growth.confidence == [confidence for _, confidence in heard]


def test_a_row_that_is_no_number_ends_its_branch_only() -> None:
    growth = TreeGrowth(ask=ASK, limit=9, width=2)
    growth.expand(-1, logits_of(()))
    growth.expand(0, torch.full((8,), torch.nan))
    growth.expand(1, logits_of((1,)))
    assert growth.parents == [-1, -1, 1, 1]
    assert len(growth.draft("x")) == 4


class TestFedRows:
    def test_rows_along_committed_tokens(self) -> None:
        fed = FedRows()
        #      7 ── 8 ── 7
        # root
        #      9 ── 8
        for token, parent in ((7, -1), (9, -1), (8, 0), (8, 1), (7, 2)):
            fed.add(token, parent)
        assert fed.path(4) == [0, 2, 4]
        assert fed.along([9, 8, 7]) == [1, 3]
        assert fed.along([7, 8, 7, 7]) == [0, 2, 4]
        assert fed.along([8]) == fed.along([]) == []
        fed.clear()
        assert len(fed) == 0 and fed.along([7]) == []

"""Drafts of early layers, chains and trees, against the same layers run over whole texts without a cache of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outpace.drafters.siblings import siblings
from outpace.drafters.tree_growth import TreeGrowth
from outpace.engine.pack import build_pack
from outpace.engine.scheduler import Turn
from outpace.kv.cache import KvCache
from outpace.protocols import Drafter
from outpace.sampling.choose import choose_rows
from outpace.types import Ask, Draft, Observation, Pack, Segment
from tests.drafters.test_drawn_laws import PARAMS, ask_for
from tests.end_to_end.tiny import CAPACITY, EXIT_LAYER, adapter, make_drafter, target
from tests.engine.harness import GREEDY, HOT, WARM

TOKENS = [5, 6, 7, 8, 2, 9]
BREADTH = 3


class Exit:
    """One request in the middle of its text: a drafter, and the target's cache that it works on."""

    def __init__(self, name: str, tokens: Sequence[int] = TOKENS) -> None:
        self.model = target("none")
        self.cache: KvCache = self.model.new_cache(2, CAPACITY, CAPACITY)
        self.drafter: Drafter = make_drafter(name, "none", self.cache)
        self.cache.allocate()  # so that its lane is another one than in the adapter's cache
        lane = self.cache.allocate()
        assert lane is not None and self.cache.reserve(lane, 60)
        self.lane, self.tokens = lane, list(tokens)
        self.drafter.start(0, self.tokens, len(self.tokens))
        self.compute(0, Draft(), 0)

    def compute(self, first: int, draft: Draft, num_new: int, accepted: tuple[int, ...] = ()) -> None:
        """Rows of the committed text from `first` on but for the last token, and what the drafter is told of it."""
        ids, count = self.tokens[first:-1], len(self.tokens) - 1 - first
        segment = (Segment(self.lane, 0, count, first),)
        pack = Pack(torch.tensor(ids), torch.arange(first, first + count), segment, torch.tensor([]), (EXIT_LAYER,))
        aux = self.model.forward(replace(pack, logits_rows=torch.tensor([0])), self.cache).aux
        needed = {layer: aux[layer] for layer in self.drafter.needs.aux_layers}
        self.drafter.observe([Observation(0, self.tokens, num_new, draft, accepted, first, needed)])

    def ask(self, **fields: object) -> Ask:
        return replace(ask_for(0, self.tokens, lane=self.lane, params=GREEDY, num_draft_tokens=8), **fields)

    def propose(self, ask: Ask) -> Draft:
        (draft,) = self.drafter.propose([ask], 100)
        return draft


def lower(tokens: Sequence[int]) -> torch.Tensor:
    """[n, H] states at the exit, of a whole text in one pass."""
    model = target("none")
    cache = model.new_cache(1, CAPACITY, CAPACITY)
    lane = cache.allocate()
    assert lane is not None and cache.reserve(lane, len(tokens))
    segments = [Segment(lane, 0, len(tokens), 0)]
    hidden = model.embed(torch.tensor(list(tokens)))
    return model.run_layers(hidden, torch.arange(len(tokens)), segments, 0, EXIT_LAYER, cache)


def exit_logits(name: str, tokens: Sequence[int]) -> torch.Tensor:
    """[V] what the exit says after a text, in one pass."""
    hidden = lower(tokens)
    if not name.startswith("adapter"):
        return target("none").logits(hidden[-1:])[0]
    own = adapter("none")
    lane = own.cache.allocate()
    assert lane is not None and own.cache.reserve(lane, len(tokens))
    last = torch.tensor([len(tokens) - 1])
    logits = own.logits(hidden, torch.arange(len(tokens)), [Segment(lane, 0, len(tokens), 0)], last)[0]
    own.cache.release(lane)
    return logits


def slow_tree(name: str, ask: Ask, width: int) -> dict[tuple[int, ...], float]:
    """Confidence by path of the tree that ought to be drafted: every node from its whole text."""
    growth = TreeGrowth(ask=ask, limit=ask.num_draft_tokens, width=width)
    growth.expand(-1, exit_logits(name, ask.token_ids))
    left = min(2 * (ask.num_draft_tokens - 1), ask.num_draft_tokens)
    while nodes := growth.to_expand(min(BREADTH, left)):
        left -= len(nodes)
        for node in nodes:
            growth.expand(node, exit_logits(name, [*ask.token_ids, *growth.paths[node]]))
    return {growth.paths[node]: growth.confidence[node] for node in growth.best()}


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.ids[node] for node in path) for path in draft.paths]


@pytest.mark.parametrize("params", [GREEDY, WARM, HOT], ids=["greedy", "warm", "hot"])
@pytest.mark.parametrize("most", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["early_exit_tree", "adapter_tree"])
def test_a_tree_is_that_of_the_layers_run_over_whole_texts(name: str, most: int, params: object) -> None:
    one = Exit(name)
    ask = one.ask(num_draft_tokens=most, params=params)
    draft = one.propose(ask)
    assert draft.confidence is not None and len(draft) == most
    assert dict(zip(paths_of(draft), draft.confidence, strict=True)) == slow_tree(name, ask, 3)
    for path, node in zip(paths_of(draft), range(most), strict=True):
        first = next(other for other in range(most) if draft.parents[other] == draft.parents[node])
        if node == first:  # the exit's own choice, drawn with the target's noise
            logits = exit_logits(name, [*TOKENS, *path[:-1]])[None]
            assert choose_rows(logits, [ask.choice(path[:-1])]) == [path[-1]]
        found = siblings(exit_logits(name, [*TOKENS, *path[:-1]]), ask.choice(path[:-1]), 3)
        assert path[-1] in [each.token for each in found]


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("name", ["early_exit", "early_exit_tree", "adapter_tree"])
def test_states_and_rows_are_where_verification_expects_them(name: str, params: object) -> None:
    """The block of a draft has the bits with its kept states that it has without them."""
    one = Exit(name)
    draft = one.propose(one.ask(num_draft_tokens=9, params=params))
    assert draft.is_chain == (name == "early_exit")
    assert draft.resume is not None and draft.resume.layer == EXIT_LAYER
    kept = len(draft.resume.hidden) - 1
    assert 1 < kept <= 8
    inner = {parent for parent in draft.parents if parent >= 0}
    assert inner <= set(range(kept)), "nodes with children come first"
    for node, state in enumerate(draft.resume.hidden, -1):
        path = paths_of(draft)[node] if node >= 0 else ()
        assert torch.equal(state, lower([*TOKENS, *path])[-1])
    assert torch.equal(block_logits(one, draft), block_logits(Exit(name), replace(draft, resume=None)))


def block_logits(one: Exit, draft: Draft) -> torch.Tensor:
    class Standing:
        lane, token_ids, num_computed, num_uncomputed = one.lane, one.tokens, len(one.tokens) - 1, 1
        params, num_prompt_tokens, prompt_logprobs = GREEDY, len(one.tokens), ()

    pack, _ = build_pack([Turn(Standing(), 1, len(draft))], [draft], ())  # type: ignore[arg-type]
    assert (pack.resume_rows is not None) == (draft.resume is not None)
    return one.model.forward(pack, one.cache).logits


@pytest.mark.parametrize("name", ["adapter", "adapter_tree"])
def test_an_adapter_keeps_the_rows_of_the_path_that_was_kept(name: str) -> None:
    """Along every path of a draft, the next draft is the one of a request that began with that text."""
    count = len(Exit(name).propose(Exit(name).ask()))
    branched = False
    for node in range(count):
        one = Exit(name)
        draft = one.propose(one.ask())
        path = draft.paths[node]
        branched = branched or any(b != a + 1 for a, b in pairwise((-1, *path)))
        first = len(one.tokens) - 1
        one.tokens = [*one.tokens, *(draft.ids[each] for each in path), 3]
        one.compute(first, draft, len(path) + 1, path)
        missing = one.drafter.rows_behind(0, len(one.tokens))
        leaf = node not in draft.parents
        assert missing is not None and missing <= leaf, "only a leaf, which was never fed, has to be caught up with"
        again = one.propose(one.ask())
        fresh = Exit(name, one.tokens)
        assert again.ids == fresh.propose(fresh.ask()).ids
    assert branched == (name == "adapter_tree")


def test_the_end_of_a_text_in_front_of_its_siblings_leaves_them_in_order() -> None:
    """It gets no children, so it has no state; a sibling behind it that has one must not come before it."""
    one = Exit("early_exit_tree")
    ends = frozenset({one.propose(one.ask()).ids[0]})
    one = Exit("early_exit_tree")
    ask = one.ask(stop_ids=ends)
    draft = one.propose(ask)
    assert draft.resume is not None and draft.confidence is not None
    assert dict(zip(paths_of(draft), draft.confidence, strict=True)) == slow_tree("early_exit_tree", ask, 3)
    top = [draft.ids[node] for node, parent in enumerate(draft.parents) if parent < 0]
    found = siblings(exit_logits("early_exit_tree", TOKENS), ask.choice(()), 3)
    assert top == [each.token for each in found][: len(top)] and len(top) > 1
    assert len(draft.resume.hidden) == 1 and len(set(draft.parents)) > 1
    assert torch.equal(block_logits(one, draft), block_logits(Exit("early_exit_tree"), replace(draft, resume=None)))


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("name", ["early_exit_tree", "adapter_tree"])
def test_drafts_for_rejection_sampling_are_chains(name: str, params: object) -> None:
    one, chain = Exit(name), Exit(name.removesuffix("_tree"))
    drafts = [each.propose(each.ask(params=params, coupled=False)) for each in (one, chain)]
    assert drafts[0].is_chain and drafts[0].ids == drafts[1].ids and len(drafts[0]) == 8
    laws = [draft.probabilities for draft in drafts]
    assert laws[0] is not None and laws[1] is not None and torch.equal(laws[0], laws[1])


def test_as_wide_as_it_is_asked_for() -> None:
    for width in (1, 2, 3):
        one = Exit("early_exit_tree")
        draft = one.propose(one.ask(width=width))
        most = max(draft.parents.count(parent) for parent in set(draft.parents))
        assert most == width and draft.is_chain == (width == 1)

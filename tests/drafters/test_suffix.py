"""Drafts from a request's own text and from past outputs: what is proposed, how much, and who sees whose text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.drafters.suffix import SuffixDrafter
from outpace.drafters.suffix_pool import OutputPool
from outpace.errors import InvalidParameter
from outpace.params import SamplingParams
from outpace.types import Ask, Draft, Observation


def ask(tokens: Sequence[int], k: int, request_id: int = 0) -> Ask:
    return Ask(request_id, tokens, k, SamplingParams(), 0, 0, 0)


def propose(
    tokens: Sequence[int],
    *,
    k: int = 4,
    shortest: int = 2,
    factor: float = 4.0,
    offset: float = 0.0,
    least_chance: float = 0.0,
    prompt: int | None = None,
) -> Draft:
    drafter = SuffixDrafter(shortest=shortest, factor=factor, offset=offset, least_chance=least_chance)
    drafter.start(0, tokens, len(tokens) if prompt is None else prompt)
    (draft,) = drafter.propose([ask(tokens, k)], 0)
    return draft


def with_pool(pool: OutputPool | None = None) -> SuffixDrafter:
    return SuffixDrafter(shortest=2, factor=2.0, offset=0.0, least_chance=0.0, pool=pool or OutputPool())


def observation(request_id: int, tokens: Sequence[int], num_new_tokens: int) -> Observation:
    return Observation(request_id, tokens, num_new_tokens, Draft(), 0, 0, {})


def answer(drafter: SuffixDrafter, request_id: int, prompt: list[int], output: list[int], tenant: str = "") -> None:
    """A whole request: its output comes token by token, and the engine tells of it."""
    drafter.start(request_id, prompt, len(prompt), tenant=tenant)
    for end in range(1, len(output) + 1):
        drafter.observe([observation(request_id, prompt + output[:end], 1)])
    drafter.release(request_id)


def drafted(drafter: SuffixDrafter, tokens: list[int], tenant: str = "", k: int = 4) -> Draft:
    drafter.start(99, tokens, len(tokens), tenant=tenant)
    (draft,) = drafter.propose([ask(tokens, k, 99)], 0)
    drafter.release(99)
    return draft


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5, 1)),  # what followed the last time
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1, 2)),  # of equally frequent ones the newest
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], (3, 8, 1, 2)),  # the more frequent one beats the newer
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 6, 1, 2, 4, 7, 1, 2], (3, 9, 8, 1)),  # the longer match beats the more frequent
        ([1, 2, 3, 4, 5, 6], ()),  # nothing to copy
        ([2, 9, 2], ()),  # one token in common is too little
        ([1], ()),
        ([5, 5, 5], (5, 5, 5, 5)),  # a repetition goes on beyond the end of the text
        ([1, 2, 1, 2], (1, 2, 1, 2)),
    ],
)
def test_what_is_copied(tokens: list[int], ids: tuple[int, ...]) -> None:
    assert propose(tokens).ids == ids


def test_a_single_token_can_be_enough() -> None:
    assert propose([2, 9, 4, 2], shortest=1).ids == (9, 4, 2, 9)


def test_sources_tell_prompt_from_output() -> None:
    draft = propose([1, 2, 3, 4, 8, 1, 2], prompt=3)
    assert draft.ids == (3, 4, 8, 1)
    assert draft.sources == ("prompt", "output", "output", "output")
    assert draft.parents == (-1, 0, 1, 2)


@pytest.mark.parametrize(
    ("match", "factor", "offset", "length"), [(2, 1.0, 0.0, 2), (3, 1.5, 0.0, 4), (3, 1.0, 2.0, 5), (4, 0.5, -1.0, 1)]
)
def test_drafts_are_as_long_as_their_match_is_good(match: int, factor: float, offset: float, length: int) -> None:
    piece = list(range(10, 10 + match))
    tokens = [*piece, *range(100, 150), *piece]
    assert propose(tokens, k=20, factor=factor, offset=offset).ids == tuple(range(100, 100 + length))
    assert len(propose(tokens, k=2, factor=factor, offset=offset)) == min(length, 2)


def test_a_match_too_short_for_a_single_token_gives_none() -> None:
    assert propose([1, 2, 3, 9, 1, 2], factor=0.5, offset=-1.0) == Draft()


def test_confidence_grows_with_agreement_and_with_the_match() -> None:
    agreed = propose([1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3, 9, 1, 2], k=1)
    split = propose([1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], k=1)
    longer = propose([6, 1, 2, 3, 8, 6, 1, 2, 3, 7, 6, 1, 2, 3, 9, 6, 1, 2], k=1)
    chances = []
    for draft in (split, agreed, longer):
        assert draft.ids == (3,) and draft.confidence is not None
        chances += draft.confidence
    assert 0 < chances[0] < chances[1] < chances[2] < 1


def test_drafts_end_where_they_become_unlikely() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    whole = propose(tokens, k=6)
    assert whole.ids == (3, 4, 5, 6, 7, 1) and whole.confidence is not None
    chances = [math.prod(whole.confidence[:size]) for size in range(1, 7)]
    assert chances[0] > chances[-1]
    for size in range(7):
        limit = 0.0 if size == 6 else chances[size] + 1e-9
        cut = propose(tokens, k=6, least_chance=limit)
        assert cut.ids == whole.ids[:size]
        assert (cut.confidence or ()) == whole.confidence[:size]


def test_drafts_are_the_same_however_the_text_came() -> None:
    tokens = [(i * i) % 7 for i in range(300)]
    drafter = SuffixDrafter(shortest=2, factor=4.0, least_chance=0.0)
    drafter.start(0, tokens[:10], 10)
    for end in range(10, len(tokens)):
        if end % 3:  # not asked every time, so several tokens are new
            (draft,) = drafter.propose([ask(tokens[:end], 3)], 0)
            assert draft == propose(tokens[:end], k=3, factor=4.0, prompt=10)


def test_requests_do_not_see_each_other() -> None:
    drafter = SuffixDrafter()
    drafter.start(0, [1, 2, 3, 4], 4)
    drafter.start(1, [9, 1, 2], 3)
    one, two = drafter.propose([ask([1, 2, 3, 4], 4, 0), ask([9, 1, 2], 4, 1)], 0)
    assert one == two == Draft()
    assert drafter.memory_bytes > 0
    drafter.release(0)
    assert drafted(drafter, [9, 1, 2]) == Draft()
    drafter.release(1)
    assert drafter.memory_bytes == 0
    with pytest.raises(KeyError):
        drafter.release(1)


@pytest.mark.parametrize(
    "settings", [{"shortest": 0}, {"factor": -1.0}, {"factor": 0.0, "offset": 0.5}, {"least_chance": 1.0}]
)
def test_settings_that_never_draft_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter):
        SuffixDrafter(**settings)  # type: ignore[arg-type]


class TestWithAPool:
    def test_past_outputs_are_drafted_from(self) -> None:
        drafter = with_pool()
        answer(drafter, 0, [50, 51], [1, 2, 3, 4, 5])
        draft = drafted(drafter, [9, 1, 2])
        assert draft.ids == (3, 4, 5)  # and not beyond its end
        assert set(draft.sources) == {"pool"}
        assert draft.confidence is not None and len(draft.confidence) == 3

    def test_prompts_do_not_enter(self) -> None:
        drafter = with_pool()
        answer(drafter, 0, [1, 2, 3, 4, 5], [60])
        assert drafted(drafter, [9, 1, 2]) == Draft()
        answer(drafter, 1, [1, 2, 3], [4, 5, 6])
        assert drafted(drafter, [3, 4]) == Draft()  # a piece that begins in the prompt is none
        assert drafted(drafter, [8, 4, 5]).ids == (6,)

    def test_tenants_see_their_own_only(self) -> None:
        drafter = with_pool()
        answer(drafter, 0, [50], [1, 2, 3, 4], tenant="one")
        for other in ("", "two", "One", "one "):
            assert drafted(drafter, [9, 1, 2], tenant=other) == Draft()
        assert drafted(drafter, [9, 1, 2], tenant="one").ids == (3, 4)

    def test_the_longer_match_wins_and_the_own_text_of_equal_ones(self) -> None:
        drafter = with_pool()
        answer(drafter, 0, [50], [7, 1, 2, 3, 3])
        assert drafted(drafter, [8, 1, 2, 4, 4, 8, 1, 2]).ids[:1] == (4,)
        assert drafted(drafter, [6, 1, 2, 4, 4, 8, 1, 2]).ids[:1] == (4,)  # two tokens each
        assert drafted(drafter, [6, 1, 2, 4, 4, 7, 1, 2]).ids[:1] == (3,)

    def test_where_the_longer_match_promises_nothing_the_other_is_asked(self) -> None:
        drafter = SuffixDrafter(least_chance=0.5, pool=OutputPool())
        answer(drafter, 0, [50], [7, 1, 2, 3, 9])
        text = [1, 2, 4, 1, 2, 4, 1, 2, 4, 7, 1, 2]  # a longer match in the pool, but that is worth less
        assert set(drafted(drafter, text).sources) == {"prompt"}
        answer(drafter, 1, [50], [*range(20, 40), 1, 2, 3, 9])
        longer = [*text, *range(20, 40), 1, 2]
        assert set(drafted(drafter, longer).sources) == {"pool"}

    def test_other_outputs_are_trusted_less(self) -> None:
        drafter = with_pool()
        answer(drafter, 0, [50], [1, 2, 3, 4])
        (pooled,) = drafted(drafter, [1, 2], k=1).confidence or ()
        (own,) = propose([1, 2, 3, 4, 1, 2], k=1).confidence or ()
        assert 0 < pooled < own

    def test_a_request_sees_what_ended_while_it_runs(self) -> None:
        drafter = with_pool()
        drafter.start(7, [9, 1], 2)
        tokens = [9, 1, 2]
        assert drafter.propose([ask(tokens, 4, 7)], 0) == [Draft()]
        answer(drafter, 0, [50], [1, 2, 3, 4])
        assert drafter.propose([ask(tokens, 4, 7)], 0)[0].ids == (3, 4)

    def test_what_a_preempted_request_had_does_not_enter_twice(self) -> None:
        pool = OutputPool()
        drafter = with_pool(pool)
        prompt, output = [50, 51], list(range(100, 200))
        answer(drafter, 0, prompt, output[:60])
        drafter.start(0, prompt + output[:61], 2)
        drafter.observe([observation(0, prompt + output, 39)])
        drafter.release(0)
        assert pool.num_tokens == 61 + 71 + 1  # 32 of the first 61 tokens are there again, for context
        assert drafted(drafter, [158, 159, 160]).ids == (161, 162, 163, 164)

    def test_without_a_pool_nothing_is_kept(self) -> None:
        drafter = SuffixDrafter()
        answer(drafter, 0, [50], [1, 2, 3, 4])
        assert drafted(drafter, [9, 1, 2]) == Draft()
        assert drafter.memory_bytes == 0


class TestTrees:
    def test_what_followed_often_comes_first_and_its_rivals_behind(self) -> None:
        """After 1 came 2 three times, 3 twice, 4 once."""
        text = [1, 2, 9, 1, 3, 8, 1, 2, 7, 1, 4, 6, 1, 2, 5, 1, 3, 0, 1]
        drafter = SuffixDrafter(tree_width=2, least_chance=0.0, offset=9.0)
        drafter.start(0, text, len(text))
        (draft,) = drafter.propose([ask(text, 3)], 0)
        first = [token for token, parent in zip(draft.ids, draft.parents, strict=True) if parent == -1]
        assert first == [2, 3]
        assert draft.ids[0] == 2 and draft.sources == ("prompt",) * 3
        assert all(parent < node for node, parent in enumerate(draft.parents))
        survival: list[float] = []
        assert draft.confidence is not None
        for parent, chance in zip(draft.parents, draft.confidence, strict=True):
            survival.append(chance * (survival[parent] if parent >= 0 else 1.0))
        assert survival == sorted(survival, reverse=True)

    def test_one_wide_is_the_chain(self) -> None:
        text = [1, 2, 9, 1, 3, 8, 1, 2, 7, 1, 4, 6, 1, 2, 5, 1, 3, 0, 1]
        drafter = SuffixDrafter(least_chance=0.0, offset=9.0)
        drafter.start(0, text, len(text))
        (draft,) = drafter.propose([ask(text, 6)], 0)
        assert draft.is_chain and len(draft) == 6

    def test_rivals_take_nothing_from_how_far_a_draft_goes(self) -> None:
        """One token matches, so two may follow, one behind the other; all four of two branches are there."""
        text = [1, 2, 3, 9, 1, 4, 5, 8, 1]
        drafter = SuffixDrafter(tree_width=2, least_chance=0.0, factor=1.0, offset=1.0)
        drafter.start(0, text, len(text))
        (draft,) = drafter.propose([ask(text, 9)], 0)
        assert draft.depth == 2 and sorted(draft.ids) == [2, 3, 4, 5]

    @pytest.mark.parametrize("width", [1, 2])
    def test_a_draft_is_as_wide_as_it_is_asked_to_be(self, width: int) -> None:
        text = [1, 2, 3, 9, 1, 4, 5, 8, 1]
        drafter = SuffixDrafter(tree_width=2, least_chance=0.0)
        drafter.start(0, text, len(text))
        (draft,) = drafter.propose([replace(ask(text, 9), width=width)], 0)
        assert draft.parents.count(-1) == width

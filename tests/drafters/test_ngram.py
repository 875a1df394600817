"""Prompt lookup: which match wins, where it comes from, and what it costs at long contexts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outpace.drafters.ngram import MAX_CANDIDATES, NgramDrafter
from outpace.params import SamplingParams
from outpace.types import Ask, Draft


def propose(
    tokens: Sequence[int], *, k: int = 4, shortest: int = 2, longest: int = 4, prompt: int | None = None
) -> Draft:
    drafter = NgramDrafter(shortest, longest)
    drafter.start(0, tokens, len(tokens) if prompt is None else prompt)
    (draft,) = drafter.propose([Ask(0, tokens, k, SamplingParams(), 0, 0, 0)], 0)
    drafter.release(0)
    return draft


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5, 1)),  # what followed the last time
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1, 2)),  # of equal matches the newest
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], (3, 9, 8, 1)),  # the longer match beats the newer
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
    assert propose([2, 9, 4, 2], shortest=1, longest=1).ids == (9, 4, 2, 9)


def test_sources_tell_prompt_from_output() -> None:
    draft = propose([1, 2, 3, 4, 8, 1, 2], k=4, prompt=3)
    assert draft.ids == (3, 4, 8, 1)
    assert draft.sources == ("prompt", "output", "output", "output")
    assert draft.parents == (-1, 0, 1, 2)


def test_matches_are_compared_up_to_the_longest_only() -> None:
    tokens = [9, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 9, 1, 2, 3, 4]
    assert propose(tokens, longest=4).ids[0] == 60  # both match four tokens, the newer wins
    assert propose(tokens, longest=5).ids[0] == 50  # the older matches five


def test_the_index_grows_with_the_text_and_matches_a_fresh_one() -> None:
    tokens = [(i * i) % 7 for i in range(300)]
    drafter = NgramDrafter(2, 5)
    drafter.start(0, tokens, 10)
    for end in range(1, len(tokens)):
        (draft,) = drafter.propose([Ask(0, tokens[:end], 3, SamplingParams(), 0, 0, 0)], 0)
        assert draft.ids == propose(tokens[:end], k=3, longest=5).ids


class CountingTokens(list[int]):
    """A text that counts how often its tokens are looked at."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        CountingTokens.reads += 1
        return super().__getitem__(index)


def test_a_token_costs_the_same_at_any_length() -> None:
    """Work is counted, not timed: reads of the text per new token stay bounded at 100,000 tokens."""
    drafter = NgramDrafter(2, 8)
    tokens = CountingTokens(i % 3 for i in range(100_000))  # every bigram occurs tens of thousands of times
    drafter.start(0, tokens, len(tokens))
    drafter.propose([Ask(0, tokens, 5, SamplingParams(), 0, 0, 0)], 0)
    assert CountingTokens.reads < 2 * len(tokens)
    CountingTokens.reads = 0
    for _ in range(10):
        tokens.append(len(tokens) % 7)
        drafter.propose([Ask(0, tokens, 5, SamplingParams(), 0, 0, 0)], 0)
    assert CountingTokens.reads < 10 * (2 * 8 * MAX_CANDIDATES + 10)
    assert drafter.memory_bytes < 1_000_000  # nine bigrams, and four bytes a token
    drafter.release(0)
    assert drafter.memory_bytes == 0

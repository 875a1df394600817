"""Prompt lookup: what followed the last few tokens the last time they appeared is likely to follow them again.

Source of the idea: Saxena, "Prompt lookup decoding" (2023). Prompt and output are searched alike, the longest match
wins, and among equally long ones the most recent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.protocols import DrafterNeeds
from outpace.types import Ask, Draft, Observation

__all__ = ["NgramDrafter", "NgramIndex"]

MAX_CANDIDATES = 48
"""Most recent occurrences compared per lookup: it bounds the time of a draft at any context length."""

BYTES_PER_KEY = 180
"""Measured memory of one dictionary entry of the index: key tuple, position and slot."""


@dataclass(slots=True)
class NgramIndex:
    """Occurrences of every n-gram of the shortest length, chained from the newest to the oldest.

    Adding a token costs O(1) time and memory whatever the context; a lookup walks at most MAX_CANDIDATES links.

    Args:
        shortest: tokens that must match.
        longest: tokens compared at most.
        newest: n-gram -> index just behind its newest occurrence.
        previous: for each index, the one just behind the previous occurrence of the same n-gram, or -1.
    """

    shortest: int
    longest: int
    newest: dict[tuple[int, ...], int] = field(default_factory=dict)
    previous: array[int] = field(default_factory=lambda: array("i"))

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes what is new. The n-gram at the very end is left out: nothing follows it yet."""
        while len(self.previous) < len(tokens):
            end = len(self.previous)
            key = tuple(tokens[end - self.shortest : end]) if end >= self.shortest else None
            self.previous.append(-1 if key is None else self.newest.get(key, -1))
            if key is not None:
                self.newest[key] = end

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of the token that followed the longest earlier match of the end of `tokens`, or None.

        `tokens` must be what `extend` saw last.
        """
        size = len(tokens)
        if size < self.shortest:
            return None
        at = self.newest.get(tuple(tokens[size - self.shortest :]), -1)
        best, best_length = None, 0
        for _ in range(MAX_CANDIDATES):
            if at < 0:
                break
            length = self._match_length(tokens, at)
            if length > best_length:
                best, best_length = at, length
                if length == self.longest:
                    break
            at = self.previous[at]
        return best

    def _match_length(self, tokens: Sequence[int], at: int) -> int:
        """How many tokens before `at` equal those at the end, up to `longest`."""
        size = len(tokens)
        length = self.shortest
        limit = min(self.longest, at)
        while length < limit and tokens[at - 1 - length] == tokens[size - 1 - length]:
            length += 1
        return length


class NgramDrafter:
    """Drafts by copying from the request's own prompt and output. Holds no weights and computes no rows.

    Args:
        shortest: tokens that must match, at least 1.
        longest: tokens compared; a longer match is preferred up to this length.
    """

    name = "ngram"
    needs = DrafterNeeds()

    def __init__(self, shortest: int = 2, longest: int = 8) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[int, NgramIndex] = {}
        self._prompt_lengths: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        return sum(len(i.newest) * BYTES_PER_KEY + len(i.previous) * 4 for i in self._indices.values())

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        self._indices[request_id] = NgramIndex(self._shortest, self._longest)
        self._prompt_lengths[request_id] = num_prompt_tokens

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn here: the index catches up with the committed tokens when it is asked."""

    def rows_behind(self, request_id: int, num_tokens: int) -> int:
        return 0

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def release(self, request_id: int) -> None:
        del self._indices[request_id]
        del self._prompt_lengths[request_id]

    def _propose(self, ask: Ask) -> Draft:
        tokens, index = ask.token_ids, self._indices[ask.request_id]
        index.extend(tokens)
        at = index.find(tokens)
        if at is None:
            return Draft()
        prompt_length = self._prompt_lengths[ask.request_id]
        size = len(tokens)
        ids: list[int] = []
        for position in range(at, at + ask.num_draft_tokens):
            # Behind the end the copy reads itself: a repetition goes on.
            ids.append(tokens[position] if position < size else ids[position - size])
        sources = ["prompt" if position < prompt_length else "output" for position in range(at, at + len(ids))]
        return Draft.chain(ids, sources)

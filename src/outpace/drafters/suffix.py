"""What followed the longest repeated end of the text most often is likely to follow it again.

Oliaro et al. "SuffixDecoding" 2411.04975, Hu et al. "SAM-Decoding" 2411.10666. The request's own prompt and output are
looked through and, where a pool is given, past outputs of the same tenant. The longest match wins, of equal ones the
request's own; the other is asked if that has nothing worth drafting. The draft follows the most frequent continuation
token by token, of equally frequent ones the newest, as far as it can be trusted. Nothing is computed by a model and no
weights are held.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.drafters.suffix_automaton import Follower, SuffixAutomaton
from outpace.drafters.suffix_pool import OutputPool, PoolMatch, PoolMatcher
from outpace.errors import InvalidParameter
from outpace.protocols import DrafterNeeds
from outpace.types import Ask, Draft, Observation

__all__ = ["LEAST_CHANCE", "SuffixDrafter"]

LEAST_CHANCE = {"adaptive": 0.1, "fixed": 0.3}
"""Of a draft to be kept, by control: a controller cuts what does not pay and knows more, else the drafter has to."""


class _Doubt(NamedTuple):
    """What speaks against a continuation beside what was counted, in occurrences; less, the longer the match.

    Fitted to greedy text of a 135M model on eight kinds of task, the pool's also to answers to prompts that were asked
    before in other words.

    Args:
        after_one: with one token that matches.
        power: with n tokens it is after_one / n ** power.
    """

    after_one: float
    power: float

    def confidence(self, length: int, agreeing: int, total: int) -> float:
        """The chance that a token is kept which followed `agreeing` of `total` times after so many matching tokens."""
        return agreeing / (total + self.after_one * math.pow(length, -self.power))


_OWN = _Doubt(1.8, 1.2)
_POOL = _Doubt(12.0, 1.9)

_RESTART_OVERLAP = 32
"""Tokens of its earlier output that a preempted request brings along, so that what is new has its context."""


@dataclass(slots=True)
class _State:
    """One request.

    Args:
        automaton: over its committed tokens, as far as they were indexed.
        num_prompt_tokens: of these, at the front.
        tenant: whose request it is.
        num_given: committed tokens when it began, or began again after preemption.
        matcher: its way through the pool; None without a pool.
    """

    automaton: SuffixAutomaton
    num_prompt_tokens: int
    tenant: str
    num_given: int
    matcher: PoolMatcher | None


@dataclass(slots=True)
class _Growing:
    """A draft while it grows: tokens, the one before each (-1: the text), their number on its path, where in the text
    they were last, and how likely each is kept."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def add(self, follower: Follower, parent: int, confidence: float) -> int:
        self.ids.append(follower.token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.positions.append(follower.position)
        self.confidence.append(confidence)
        return len(self.ids) - 1

    def draft(self, sources: Sequence[str]) -> Draft:
        if not self.ids:
            return Draft()
        return Draft(tuple(self.ids), tuple(self.parents), tuple(sources), confidence=tuple(self.confidence))


class SuffixDrafter:
    """Drafts from a suffix automaton over every request's own text, and from a pool of past outputs.

    Args:
        shortest: tokens that must match, at least 1.
        factor: draft tokens, one behind the other, for every token that matches.
        offset: draft tokens added to that; may be negative.
        least_chance: a draft ends where its tokens are all kept with less than this chance, by their confidence. 0 for
            no such end.
        pool: past outputs; a request's own enter it when the request goes. None: no request sees another's text.
        tree_width: most continuations of a token.

    Raises:
        InvalidParameter: no match could ever give a draft.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        shortest: int = 1,
        factor: float = 2.0,
        offset: float = 2.0,
        least_chance: float = LEAST_CHANCE["fixed"],
        pool: OutputPool | None = None,
        tree_width: int = 1,
    ) -> None:
        if shortest < 1:
            raise InvalidParameter(f"shortest={shortest} is not possible: at least 1 token must match")
        if factor < 0 or (factor == 0 and offset < 1):
            raise InvalidParameter(
                f"factor={factor} with offset={offset} never drafts: factor must be above 0, or 0 with an offset of 1"
            )
        if not 0 <= least_chance < 1:
            raise InvalidParameter(f"least_chance={least_chance} is not possible: it must be in [0, 1)")
        self._shortest = shortest
        self._factor = factor
        self._offset = offset
        self._least_chance = least_chance
        self._pool = pool
        self.needs = DrafterNeeds(width=tree_width)
        self._states: dict[int, _State] = {}

    @property
    def memory_bytes(self) -> int:
        own = sum(state.automaton.memory_bytes for state in self._states.values())
        return own + (0 if self._pool is None else self._pool.memory_bytes)

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        matcher = None if self._pool is None else PoolMatcher(self._pool, tenant)
        self._states[request_id] = _State(SuffixAutomaton(), num_prompt_tokens, tenant, len(token_ids), matcher)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Takes the committed tokens of requests whose outputs will go into the pool; others wait until they ask."""
        for seen in observations:
            state = self._states[seen.request_id]
            if state.matcher is not None and seen.num_new_tokens:
                _catch_up(state, seen.token_ids)

    def rows_behind(self, request_id: int, num_tokens: int) -> int:
        return 0

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def release(self, request_id: int) -> None:
        """Puts the output, without the tokens of the last step, which nobody told of, into the pool if there is one."""
        state = self._states.pop(request_id)
        if self._pool is not None:
            begin = max(state.num_prompt_tokens, state.num_given - _RESTART_OVERLAP)
            self._pool.add(state.tenant, state.automaton.tokens[begin:])

    def _propose(self, ask: Ask) -> Draft:
        state = self._states[ask.request_id]
        _catch_up(state, ask.token_ids)
        found = None if state.matcher is None else state.matcher.find(ask.token_ids)
        most, width = ask.num_draft_tokens, self.needs.width
        if ask.width is not None:
            width = min(width, ask.width)
        if found is None:
            return self._from_own_text(state, most, width)
        if found.length > state.automaton.length(state.automaton.match):
            return self._from_pool(found, most, width) or self._from_own_text(state, most, width)
        return self._from_own_text(state, most, width) or self._from_pool(found, most, width)

    def _from_own_text(self, state: _State, most: int, width: int) -> Draft:
        automaton = state.automaton
        grown = self._follow(automaton, automaton.match, automaton.length(automaton.match), _OWN, most, width)
        sources = ["prompt" if place < state.num_prompt_tokens else "output" for place in grown.positions]
        return grown.draft(sources)

    def _from_pool(self, found: PoolMatch, most: int, width: int) -> Draft:
        assert self._pool is not None
        grown = self._follow(found.segment.automaton, found.state, found.length, _POOL, most, width)
        if grown.ids:
            self._pool.touch(found.segment)
        return grown.draft(["pool"] * len(grown.ids))

    def _follow(
        self, automaton: SuffixAutomaton, state: int, length: int, doubt: _Doubt, most: int, width: int
    ) -> _Growing:
        """Tokens after a match, the most frequent ones after the match and the tokens before them, most likely first.

        Where the text ends it goes on from the text's own match, which repeats the repetition. A negative number in
        the text ends the draft.

        Args:
            automaton: over the text.
            state: of the match.
            length: tokens that match.
            doubt: how far the match is trusted.
            most: tokens wanted.
            width: most continuations of a token.
        """
        grown, order = _Growing(), itertools.count()
        deepest = int(self._factor * length + self._offset) if length >= self._shortest else 0
        heap: list[
            tuple[float, int, int, float, int, Follower]
        ] = []  # -chance, order, parent, confidence, length, token
        parent, chance, depth = -1, 1.0, 0
        while deepest > 0 and len(grown.ids) < most:
            followers = automaton.followers(state, width) if depth < deepest else []
            if not followers and depth < deepest:
                state = automaton.match
                length = automaton.length(state)
                followers = automaton.followers(state, width)
            for follower in followers:
                confidence = doubt.confidence(length, follower.agreeing, follower.total)
                if follower.token >= 0 and chance * confidence >= self._least_chance:
                    heapq.heappush(heap, (-chance * confidence, next(order), parent, confidence, length, follower))
            if not heap:
                break
            negative, _, parent, confidence, length, follower = heapq.heappop(heap)
            parent = grown.add(follower, parent, confidence)
            depth = grown.depths[parent]
            chance, state, length = -negative, follower.state, length + 1
        return grown


def _catch_up(state: _State, token_ids: Sequence[int]) -> None:
    """Indexes what is new."""
    state.automaton.extend(token_ids[len(state.automaton) :])

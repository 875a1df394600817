"""What followed the longest repeated end of the text most often is likely to follow it again.

Oliaro et al. "SuffixDecoding" 2411.04975, Hu et al. "SAM-Decoding" 2411.10666. The request's own prompt and output are
looked through and, where a pool is given, past outputs of the same tenant. The longest match wins, of equal ones the
request's own. The draft follows the most frequent continuation token by token, of equally frequent ones the newest, and
may be as long as the match is trustworthy. Nothing is computed by a model and no weights are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.drafters.suffix_automaton import SuffixAutomaton
from outpace.drafters.suffix_pool import OutputPool, PoolMatcher
from outpace.errors import InvalidParameter
from outpace.protocols import DrafterNeeds
from outpace.types import Ask, Draft, Observation

__all__ = ["SuffixDrafter"]

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
class _Chain:
    """A draft while it grows."""

    ids: list[int]
    sources: list[str]
    confidence: list[float]


class SuffixDrafter:
    """Drafts from a suffix automaton over every request's own text, and from a pool of past outputs.

    Args:
        shortest: tokens that must match, at least 1.
        factor: draft tokens for every token that matches.
        offset: draft tokens added to that; may be negative.
        pool: past outputs; a request's own enter it when the request goes. None: no request sees another's text.

    Raises:
        InvalidParameter: no match could ever give a draft.
    """

    name = "suffix"
    needs = DrafterNeeds()

    def __init__(
        self, *, shortest: int = 2, factor: float = 1.0, offset: float = 0.0, pool: OutputPool | None = None
    ) -> None:
        if shortest < 1:
            raise InvalidParameter(f"shortest={shortest} is not possible: at least 1 token must match")
        if factor < 0 or (factor == 0 and offset < 1):
            raise InvalidParameter(
                f"factor={factor} with offset={offset} never drafts: factor must be above 0, or 0 with an offset of 1"
            )
        self._shortest = shortest
        self._factor = factor
        self._offset = offset
        self._pool = pool
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
        own = state.automaton.match
        length = state.automaton.length(own)
        found = None if state.matcher is None else state.matcher.find(ask.token_ids)
        if found is not None and found.length > length:
            limit = self._limit(found.length, ask.num_draft_tokens)
            chain = _follow(found.segment.automaton, found.state, found.length, limit, 0, pooled=True)
            if chain.ids and self._pool is not None:
                self._pool.touch(found.segment)
        else:
            limit = self._limit(length, ask.num_draft_tokens)
            chain = _follow(state.automaton, own, length, limit, state.num_prompt_tokens, pooled=False)
        return Draft.chain(chain.ids, chain.sources, confidence=chain.confidence) if chain.ids else Draft()

    def _limit(self, length: int, most: int) -> int:
        """Draft tokens behind a match of so many tokens."""
        return min(most, int(self._factor * length + self._offset)) if length >= self._shortest else 0


def _catch_up(state: _State, token_ids: Sequence[int]) -> None:
    """Indexes what is new."""
    state.automaton.extend(token_ids[len(state.automaton) :])


def _follow(
    automaton: SuffixAutomaton, state: int, length: int, limit: int, num_prompt: int, *, pooled: bool
) -> _Chain:
    """At most `limit` tokens, each the most frequent one after the match and the draft so far.

    Where the text itself ends it goes on from the text's match, which repeats the repetition.

    Args:
        automaton: over the request's own text or, if `pooled`, over outputs with negative numbers between them.
        state: of the match.
        length: tokens that match.
        limit: most tokens.
        num_prompt: tokens of the automaton's text that are prompt.
        pooled: what the tokens are called, and that the text does not go on behind an output.
    """
    chain = _Chain([], [], [])
    while len(chain.ids) < limit:
        follower = automaton.follower(state)
        if follower is None:
            state = automaton.match
            length = automaton.length(state)
            continue
        if follower.token < 0:
            break
        chain.ids.append(follower.token)
        chain.sources.append("pool" if pooled else "prompt" if follower.position < num_prompt else "output")
        chain.confidence.append(_confidence(length, follower.agreeing, follower.total))
        state = follower.state
        length += 1
    return chain


def _confidence(length: int, agreeing: int, total: int) -> float:
    """How likely a token is kept that followed `agreeing` of `total` times after so many matching tokens."""
    return (agreeing + 0.5) / (total + 1.0) * (1 - 0.5**length)

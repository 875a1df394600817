"""Decides who computes what in a step. There are no phases: every request only catches up.

A request's turn computes committed tokens that are not in the cache yet, and, when it reaches the last of them, may
add draft tokens to be verified. Prefill, plain decoding, verification and recomputation after preemption are the
same thing with different numbers.

Rows are reserved here, before anything is drafted, so a draft that was made is never cut for want of room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outpace.engine.prefixes import Prefixes
from outpace.engine.request import Request
from outpace.protocols import Cache

__all__ = ["DraftLimits", "Schedule", "Scheduler", "Turn"]

_PREFILL_BESIDE_DECODING = 128
"""Most prompt rows of a step in which somebody waits for a next token: such a step takes about as long as 20 others,
and one of 512 rows as long as 70. A drafter that is behind gets no more either."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request does in one step.

    Args:
        request: whose turn.
        num_tokens: committed tokens to compute, from `num_computed` on.
        num_draft_tokens: most draft tokens to verify behind them; their rows are reserved. 0 unless the turn
            reaches the last committed token.
    """

    request: Request
    num_tokens: int
    num_draft_tokens: int

    @property
    def reaches_end(self) -> bool:
        return self.num_tokens == self.request.num_uncomputed


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step's turns, and who came and went.

    Args:
        turns: decoding requests first, then prefill, each in order of arrival.
        admitted: requests that got a lane in this step.
        preempted: requests that lost theirs, to be recomputed later.
        free_rows: rows of the step's budget that nobody uses.
    """

    turns: list[Turn] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    free_rows: int = 0


class DraftLimits(Protocol):
    """How many draft tokens are worth rows."""

    def ceilings(self, requests: Sequence[Request], num_running: int, prompt_rows: int) -> Mapping[Request, int]:
        """Most draft tokens that may pay, of each of these decoding requests, beside `num_running` in all.

        Args:
            requests: that decode.
            num_running: requests.
            prompt_rows: that the step will compute beside theirs, as far as one can tell.
        """
        ...

    def most(self, request: Request, num_tokens: int, num_running: int) -> int:
        """Most draft tokens behind `num_tokens` committed ones to compute, whether they pay or not."""
        ...


class Scheduler:
    """First come, first served, within a row budget a step and the rows of the cache.

    Args:
        cache: the target's cache.
        prefixes: rows of requests that have gone, of the same cache.
        max_num_seqs: most requests side by side.
        max_num_batched_tokens: most rows a step; must exceed max_num_seqs so that prefill always advances.
        limits: how much drafting is worth.
    """

    def __init__(
        self,
        cache: Cache,
        prefixes: Prefixes,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        limits: DraftLimits,
    ) -> None:
        assert max_num_batched_tokens > max_num_seqs >= 1, (max_num_batched_tokens, max_num_seqs)
        self._cache = cache
        self._prefixes = prefixes
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_num_batched_tokens
        self._limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Takes a request out, wherever it is. Returns whether it held a lane."""
        if request in self.running:
            self.running.remove(request)
            self._give_up_lane(request)
            return True
        if request in self.waiting:
            self.waiting.remove(request)
        return False

    def schedule(self) -> Schedule:
        """Hands out this step's rows: one for every decoding request, then prefill, then drafts.

        Rows of the step are set aside for drafts before prefill, but half of them at most while somebody waits for a
        first token. Rows of the cache go to drafts last, so that no draft ever costs another request its place.
        """
        preempted: list[Request] = []
        admitted: list[Request] = []
        decoding = [r for r in self.running if r.num_uncomputed == 1]
        prefilling = [r for r in self.running if r.num_uncomputed > 1]
        tokens: dict[Request, int] = {}
        for request in decoding:
            self._reserve(request, 1, tokens, preempted)
        budget = self._max_rows - len(tokens)
        prompt_rows = self._prompt_rows(prefilling, budget)
        ceilings = self._limits.ceilings(list(tokens), len(self.running), prompt_rows)
        wanted = sum(ceilings.values())
        draft_budget = min(wanted, budget // 2 if prompt_rows else budget)
        budget -= draft_budget
        prefill_budget = min(budget, _PREFILL_BESIDE_DECODING) if tokens else budget
        for request in prefilling:
            if prefill_budget and request.lane is not None:
                prefill_budget -= self._reserve(request, min(request.next_chunk, prefill_budget), tokens, preempted)
        while prefill_budget and not preempted and self._can_admit():
            new = self._admit()
            if new is None:
                break
            admitted.append(new)
            prefill_budget -= self._reserve(new, min(new.next_chunk, prefill_budget), tokens, preempted)
        turns, free_rows = self._with_drafts(tokens, ceilings, draft_budget + prefill_budget)
        return Schedule(turns, [r for r in admitted if r.lane is not None], preempted, free_rows)

    def _prompt_rows(self, prefilling: Sequence[Request], budget: int) -> int:
        """Rows of prompts that a step of decoding requests will probably compute too."""
        wanted = sum(request.next_chunk for request in prefilling)
        if self._can_admit():
            wanted += self.waiting[0].next_chunk
        return min(wanted, budget, _PREFILL_BESIDE_DECODING)

    def _with_drafts(
        self, tokens: Mapping[Request, int], ceilings: Mapping[Request, int], budget: int
    ) -> tuple[list[Turn], int]:
        """Adds drafts where rows of the step and of the cache allow. Returns the turns and the rows nobody uses.

        A batch that has grown by those who were just admitted may be too large for drafts that it allowed before.
        """
        turns: list[Turn] = []
        for request, num_tokens in tokens.items():
            most = self._limits.most(request, num_tokens, len(self.running))
            granted = min(ceilings.get(request, most), most, budget, self._num_free_rows)
            if granted and not self._has_rows(request, num_tokens, granted):
                granted = 0
            budget -= granted
            turns.append(Turn(request, num_tokens, granted))
        return turns, budget

    def _reserve(self, request: Request, num_tokens: int, tokens: dict[Request, int], preempted: list[Request]) -> int:
        """Reserves rows for a turn, pushing out the youngest requests if it must. Returns rows: 0 if it went itself."""
        while request.lane is not None:
            if self._has_rows(request, 0, num_tokens):
                tokens[request] = num_tokens
                return num_tokens
            victim = self.running[-1]
            tokens.pop(victim, None)
            self._preempt(victim)
            preempted.append(victim)
        return 0

    def _has_rows(self, request: Request, before: int, more: int) -> bool:
        """Reserves `more` rows behind the computed ones and `before` more, giving up kept ones if it must."""
        assert request.lane is not None
        rows = request.num_computed + before + more
        return self._prefixes.make_room(more) and self._cache.reserve(request.lane, rows)

    def recompute_all(self) -> list[Request]:
        """Takes every lane away, as after a step that failed half-way. Returns who held one.

        Rows that earlier steps computed are still right, and are kept for them as for anybody.
        """
        gone = list(self.running)
        while self.running:
            self._preempt(self.running[-1])
        return gone

    def recompute(self, requests: Sequence[Request]) -> None:
        """Takes the lanes of some running requests away; the next step gives them back, with the rows that were kept.

        Args:
            requests: in order of arrival, as they stand in `running`.
        """
        for request in reversed(requests):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """The youngest request gives back its rows and will be recomputed; it keeps its place in the queue."""
        self.running.remove(request)
        self._give_up_lane(request)
        request.stats.preemptions += 1
        self.waiting.appendleft(request)

    def _give_up_lane(self, request: Request) -> None:
        """Rows that are right are kept; those of a request that failed may hold what is not a number."""
        assert request.lane is not None
        self._prefixes.keep(request.lane, [] if request.error else request.token_ids[: request.num_computed])
        request.lane = None
        request.num_computed = 0

    def _can_admit(self) -> bool:
        """Admission needs room for the whole request as it stands, so that it does not push itself out again."""
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        return len(self.waiting[0].token_ids) < self._num_free_rows or not self.running

    def _admit(self) -> Request | None:
        """Gives the first who waits a lane, with the rows that others have computed for it.

        None if it is better off waiting for rows that somebody is about to compute, as for the prompt of n choices.
        """
        request = self.waiting[0]
        match = self._prefixes.find(request, self.running)
        if match.is_worth_waiting:
            return None
        lane = self._prefixes.lane_for(match, len(request.token_ids))
        self.waiting.popleft()
        request.lane = lane
        self.running.append(request)  # from here on an interrupt finds it among those to be computed again
        request.num_computed = self._prefixes.fill(lane, match)
        self._prefixes.count(request, request.num_computed)
        return request

    @property
    def _num_free_rows(self) -> int:
        """Rows that nobody holds who runs."""
        return self._cache.free_rows + self._prefixes.num_rows

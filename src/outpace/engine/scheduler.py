"""Decides who computes what in a step. There are no phases: every request only catches up.

A request's turn computes committed tokens that are not in the cache yet, and, when it reaches the last of them, may
add draft tokens to be verified. Prefill, plain decoding, verification and recomputation after preemption are the
same thing with different numbers.

Rows are reserved here, before anything is drafted, so a draft that was made is never cut for want of room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outpace.engine.request import Request
from outpace.protocols import Cache

__all__ = ["Schedule", "Scheduler", "Turn"]


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


class Scheduler:
    """First come, first served, within a row budget a step and the rows of the cache.

    Args:
        cache: the target's cache.
        max_num_seqs: most requests side by side.
        max_num_batched_tokens: most rows a step; must exceed max_num_seqs so that prefill always advances.
    """

    def __init__(self, cache: Cache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens > max_num_seqs >= 1, (max_num_batched_tokens, max_num_seqs)
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_num_batched_tokens
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
        self.waiting.remove(request)
        return False

    def schedule(self) -> Schedule:
        """Hands out this step's rows: one for every decoding request, drafts, then prefill with what is left."""
        plan = Schedule()
        decoding = [r for r in self.running if r.num_uncomputed == 1]
        prefilling = [r for r in self.running if r.num_uncomputed > 1]
        budget = self._max_rows - len(decoding)
        # Drafts may take half of the budget while somebody waits for a first token.
        draft_budget = budget // 2 if prefilling or self._can_admit() else budget
        for request in decoding:
            if request.lane is None:  # preempted a moment ago for an earlier one
                budget += 1
                continue
            wanted = min(self._num_draft_tokens(request), draft_budget)
            granted = self._reserve(request, 1, wanted, plan)
            if granted is None:
                budget += 1
                continue
            budget, draft_budget = budget - granted, draft_budget - granted
            plan.turns.append(Turn(request, 1, granted))
        for request in prefilling:
            if budget and request.lane is not None:
                budget -= self._prefill(request, budget, plan)
        while budget and not plan.preempted and self._can_admit():
            request = self.waiting.popleft()
            request.lane = self._cache.allocate()
            self.running.append(request)
            plan.admitted.append(request)
            budget -= self._prefill(request, budget, plan)
        return Schedule(plan.turns, plan.admitted, plan.preempted, free_rows=budget)

    def _prefill(self, request: Request, budget: int, plan: Schedule) -> int:
        """Gives a turn of committed tokens, with drafts if it reaches the end. Returns rows used."""
        num_tokens = min(request.num_uncomputed, budget)
        wanted = 0
        if num_tokens == request.num_uncomputed:
            wanted = min(self._num_draft_tokens(request), budget - num_tokens)
        granted = self._reserve(request, num_tokens, wanted, plan)
        if granted is None:
            return 0
        plan.turns.append(Turn(request, num_tokens, granted))
        return num_tokens + granted

    def _num_draft_tokens(self, request: Request) -> int:
        """A step brings one token more than it drafts, so the last token allowed is never drafted."""
        if request.drafter is None:
            return 0
        return min(request.num_speculative_tokens, request.max_total_tokens - len(request.token_ids) - 1)

    def _reserve(self, request: Request, num_tokens: int, num_draft_tokens: int, plan: Schedule) -> int | None:
        """Reserves rows, giving up the draft first and then the youngest requests. None if `request` had to go."""
        assert request.lane is not None
        base = request.num_computed + num_tokens
        if self._cache.reserve(request.lane, base + num_draft_tokens):
            return num_draft_tokens
        while not self._cache.reserve(request.lane, base):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return None
        return 0

    def _preempt(self, request: Request, plan: Schedule) -> None:
        """The youngest request gives back its rows and will be recomputed; it keeps its place in the queue."""
        self.running.remove(request)
        self._give_up_lane(request)
        request.stats.preemptions += 1
        self.waiting.appendleft(request)
        plan.preempted.append(request)
        plan.turns[:] = [turn for turn in plan.turns if turn.request is not request]

    def _give_up_lane(self, request: Request) -> None:
        assert request.lane is not None
        self._cache.release(request.lane)
        request.lane = None
        request.num_computed = 0

    def _can_admit(self) -> bool:
        """Admission needs room for the whole request as it stands, so that it does not push itself out again."""
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        return len(self.waiting[0].token_ids) < self._cache.free_rows or not self.running

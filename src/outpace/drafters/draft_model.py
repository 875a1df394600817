"""A small model with the target's vocabulary drafts token by token, for all requests at once.

Leviathan et al. 2211.17192, Chen et al. 2302.01318. How a token is drawn from its logits is in `growth.py`.

    target's tokens   t0 t1 ... t_n          committed, t_n not yet computed by the target
    draft cache rows  [0, num_rows)          what the draft model has computed
    a proposal        rows up to t_n (catching up), then d1 .. d_{k-1}; the last draft token is never fed
    after the verdict rows of the committed tokens stay, the rest is rolled back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.drafters.growth import Growth, extend
from outpace.protocols import Cache, DrafterNeeds, TargetModel
from outpace.types import Ask, Draft, Observation, Pack, Segment

__all__ = ["DraftModelDrafter"]


@dataclass(slots=True)
class _State:
    """What the draft model has computed for one request.

    Args:
        lane: in the draft cache.
        num_rows: rows [0, num_rows) hold committed tokens.
        num_fed: rows of draft tokens behind them, from the last proposal.
    """

    lane: int
    num_rows: int = 0
    num_fed: int = 0


@dataclass(slots=True, kw_only=True)
class _Growth(Growth):
    """One draft while it grows, to at most `limit` tokens: `rows` are the tokens to feed next."""

    state: _State
    limit: int
    rows: Sequence[int]


class DraftModelDrafter:
    """Runs a second, smaller model with a cache of its own.

    Args:
        model: the draft model; its logits are over the same token ids as the target's.
        cache: its cache, with a lane for every request the engine runs side by side.
        max_model_len: positions the draft model can compute; beyond them it stops drafting.
        weight_bytes: memory of its weights, for the statistics.
    """

    name = "draft_model"
    needs = DrafterNeeds(computes=True)

    def __init__(self, model: TargetModel, cache: Cache, *, max_model_len: int, weight_bytes: int = 0) -> None:
        self._model = model
        self._cache = cache
        self._max_len = min(max_model_len, cache.capacity)
        self._weight_bytes = weight_bytes
        self._states: dict[int, _State | None] = {}  # None: no lane was free, so nothing is drafted

    @property
    def memory_bytes(self) -> int:
        return self._weight_bytes + self._cache.bytes_in_use

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        lane = self._cache.allocate()
        self._states[request_id] = None if lane is None else _State(lane)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keeps the rows of what was committed and rolls back the rest, in O(draft length)."""
        for seen in observations:
            state = self._states[seen.request_id]
            if state is None:
                continue
            # Accepted tokens are the first of those fed; the newest token is always fed again, since its logits are
            # where the next draft starts. After full acceptance one row is missing, and the next draft catches up.
            state.num_rows = min(state.num_rows + state.num_fed, len(seen.token_ids) - 1)
            state.num_fed = 0
            self._cache.truncate(state.lane, state.num_rows)

    def rows_behind(self, request_id: int, num_tokens: int) -> int:
        state = self._states[request_id]
        return 0 if state is None else max(0, num_tokens - 1 - state.num_rows)

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        growths = [g for ask in asks if (g := self._begin(ask)) is not None]
        active = self._catch_up(growths, row_budget)
        while active:
            active = [g for g in extend(active, self._forward(active)) if len(g.ids) < g.limit and g.is_worth_more]
            for growth in active:
                growth.rows = growth.ids[-1:]
        drafts = {growth.ask.request_id: growth.draft("draft model") for growth in growths}
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        if state is not None:
            self._cache.release(state.lane)

    def _begin(self, ask: Ask) -> _Growth | None:
        """Reserves the rows of a draft; None if there is no lane, no room, or the context of this model has ended."""
        state = self._states[ask.request_id]
        limit = min(ask.num_draft_tokens, self._max_len - len(ask.token_ids) + 1)
        if state is None or limit < 1 or not self._cache.reserve(state.lane, len(ask.token_ids) + limit - 1):
            return None
        return _Growth(ask=ask, state=state, limit=limit, rows=ask.token_ids[state.num_rows :])

    def _catch_up(self, growths: Sequence[_Growth], row_budget: int) -> list[_Growth]:
        """Computes what the budget allows of what is missing; returns those that can draft now."""
        active: list[_Growth] = []
        behind: list[_Growth] = []
        for growth in growths:
            missing = len(growth.rows) - 1
            if missing <= row_budget:
                row_budget -= missing
                active.append(growth)
            elif row_budget:
                growth.rows = growth.rows[:row_budget]
                row_budget = 0
                behind.append(growth)
        if behind:
            self._forward(behind, wanted=False)
        return active

    def _forward(self, growths: Sequence[_Growth], *, wanted: bool = True) -> torch.Tensor:
        """Feeds each draft's next rows. Returns the logits [len(growths), V] of their last ones, if wanted."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for growth in growths:
            state, begin = growth.state, len(ids)
            first = state.num_rows + state.num_fed
            ids += growth.rows
            positions += range(first, first + len(growth.rows))
            segments.append(Segment(state.lane, begin, len(ids), first))
            if growth.ids:
                state.num_fed += len(growth.rows)
            else:
                state.num_rows += len(growth.rows)
        pack = Pack(
            ids=torch.tensor(ids, dtype=torch.int64, device="cpu"),
            positions=torch.tensor(positions, dtype=torch.int64, device="cpu"),
            segments=tuple(segments),
            logits_rows=torch.tensor([s.end - 1 for s in segments] if wanted else [], dtype=torch.int64, device="cpu"),
        )
        return self._model.forward(pack, self._cache).logits

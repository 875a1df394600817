"""Self-speculation: the target's own first E layers draft, on the target's own cache rows.

Zhang et al. "Draft & Verify" 2309.08168, Elhoushi et al. "LayerSkip" 2404.16710, Liu et al. "Kangaroo" 2404.18911. No
second model is in memory. While drafting, the row of every token but the last draft token runs layers [0, E); those
rows and their states at E are kept, so verification runs these layers only for the last draft token and [E, L)
for all.

    rows     t      d1     d2    ...   d_{k-1}    d_k
    [0, E)   draft  draft  draft       draft      verify
    [E, L)   verify for all of them, in one pass

Ordinary checkpoints seldom agree with their own early layers, so an exit may carry a trained adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outpace.drafters.growth import Growth, extend
from outpace.protocols import Cache, DrafterNeeds, ExitAdapter, LayeredModel
from outpace.types import Ask, Draft, Observation, Resume, Segment

__all__ = ["EarlyExitDrafter"]


@dataclass(slots=True)
class _State:
    """What the adapter has computed for one request.

    Args:
        lane: in the adapter's cache.
        num_rows: rows [0, num_rows) hold committed positions.
        num_fed: rows behind them, of draft tokens.
        pending: [n, H] states at the exit of the committed positions behind `num_rows` that it has not computed.
    """

    lane: int
    num_rows: int = 0
    num_fed: int = 0
    pending: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(rows.shape[0] for rows in self.pending)


@dataclass(slots=True, kw_only=True)
class _Growth(Growth):
    """One draft while it grows: `hidden` are the kept states, [1, H] each."""

    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def first_position(self) -> int:
        """Of the last committed token."""
        return len(self.ask.token_ids) - 1


class EarlyExitDrafter:
    """Drafts with layers [0, exit_layer) of the target.

    Args:
        model: the target itself.
        cache: the target's cache.
        exit_layer: layers to run, 1 to num_layers - 1.
        adapter: trained network at this exit; None reads the exit with the target's own final norm and head.
    """

    name = "early_exit"

    def __init__(
        self, model: LayeredModel, cache: Cache, *, exit_layer: int, adapter: ExitAdapter | None = None
    ) -> None:
        assert 1 <= exit_layer < model.num_layers, (exit_layer, model.num_layers)
        assert adapter is None or adapter.exit_layer == exit_layer
        self.exit_layer = exit_layer
        aux_layers = () if adapter is None else (exit_layer,)
        # An adapter has a row of its own for every row of the target.
        self.needs = DrafterNeeds(aux_layers, computes=True, target_rows=True, every_row=adapter is not None)
        self._model = model
        self._cache = cache
        self._adapter = adapter
        self._states: dict[int, _State | None] = {}  # None: no adapter, or no lane of its cache was free

    @property
    def memory_bytes(self) -> int:
        return 0 if self._adapter is None else self._adapter.weight_bytes + self._adapter.cache.bytes_in_use

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        lane = None if self._adapter is None else self._adapter.cache.allocate()
        self._states[request_id] = None if lane is None else _State(lane)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Collects states at the exit for the adapter and rolls its cache back to what was committed."""
        if self._adapter is None:
            return
        for seen in observations:
            state = self._states[seen.request_id]
            if state is None:
                continue
            rows = seen.aux[self.exit_layer]
            end = seen.first_position + rows.shape[0]
            state.num_rows = min(state.num_rows + state.num_fed, end)
            state.num_fed = 0
            self._adapter.cache.truncate(state.lane, state.num_rows)
            known = state.num_rows + state.num_pending
            if known < end:
                state.pending.append(rows[known - seen.first_position :])

    def rows_behind(self, request_id: int, num_tokens: int) -> int | None:
        if self._adapter is None:
            return 0
        state = self._states[request_id]
        return None if state is None else state.num_pending

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        growths = [_Growth(ask=ask) for ask in asks]
        active = [g for g in growths if self._adapter is None or self._reserve(g)]
        if self._adapter is not None:
            active = self._within_budget(active, row_budget)
        while active:
            self._run_lower_layers(active)
            drawn = extend(active, self._exit_logits(active))
            active = [g for g in drawn if len(g.ids) < g.ask.num_draft_tokens and g.is_worth_more]
        return [self._draft(g) for g in growths]

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        if state is not None:
            assert self._adapter is not None
            self._adapter.cache.release(state.lane)

    def _draft(self, growth: _Growth) -> Draft:
        if not growth.ids:
            return Draft()
        return growth.draft("early exit", Resume(self.exit_layer, torch.cat(growth.hidden)))

    def _run_lower_layers(self, growths: Sequence[_Growth]) -> None:
        """One row each: the newest token through [0, E), into the target's own cache."""
        ids, positions, segments = [], [], []
        for row, growth in enumerate(growths):
            position = growth.first_position + len(growth.ids)
            ids.append(growth.ids[-1] if growth.ids else growth.ask.token_ids[-1])
            positions.append(position)
            segments.append(Segment(growth.ask.lane, row, row + 1, position))
        hidden = self._model.embed(torch.tensor(ids, dtype=torch.int64, device="cpu"))
        where = torch.tensor(positions, dtype=torch.int64, device="cpu")
        hidden = self._model.run_layers(hidden, where, segments, 0, self.exit_layer, self._cache)
        for row, growth in enumerate(growths):
            growth.hidden.append(hidden[row : row + 1])

    def _exit_logits(self, growths: Sequence[_Growth]) -> torch.Tensor:
        """[len(growths), V] logits after each newest row; the adapter first computes what it is behind."""
        if self._adapter is None:
            return self._model.logits(torch.cat([g.hidden[-1] for g in growths]))
        return self._feed_adapter([(g, [*self._state(g).pending, g.hidden[-1]]) for g in growths], wanted=True)

    def _feed_adapter(self, fed: Sequence[tuple[_Growth, list[torch.Tensor]]], *, wanted: bool) -> torch.Tensor:
        """Runs the adapter over states of each request, which follow the rows it has. Logits of the last, if wanted."""
        assert self._adapter is not None
        hidden: list[torch.Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for growth, states in fed:
            state, begin = self._state(growth), len(positions)
            first = state.num_rows + state.num_fed
            count = sum(rows.shape[0] for rows in states)
            hidden += states
            positions += range(first, first + count)
            segments.append(Segment(state.lane, begin, begin + count, first))
            if growth.ids:  # from the second draft token on the row is an uncommitted token's
                state.num_fed += count
            else:
                state.num_rows += count
            state.pending = []
        where = torch.tensor(positions, dtype=torch.int64, device="cpu")
        last = torch.tensor([s.end - 1 for s in segments] if wanted else [], dtype=torch.int64, device="cpu")
        return self._adapter.logits(torch.cat(hidden), where, segments, last)

    def _reserve(self, growth: _Growth) -> bool:
        state = self._states[growth.ask.request_id]
        assert self._adapter is not None
        rows = growth.first_position + growth.ask.num_draft_tokens
        return state is not None and self._adapter.cache.reserve(state.lane, rows)

    def _within_budget(self, growths: Sequence[_Growth], row_budget: int) -> list[_Growth]:
        """Those whose adapter can catch up with what was committed; another computes what the budget allows."""
        active: list[_Growth] = []
        for growth in growths:
            state = self._state(growth)
            missing = state.num_pending
            if missing <= row_budget:
                row_budget -= missing
                active.append(growth)
            elif row_budget:
                rows = torch.cat(state.pending)
                self._feed_adapter([(growth, [rows[:row_budget]])], wanted=False)
                state.pending = [rows[row_budget:]]
                row_budget = 0
        return active

    def _state(self, growth: _Growth) -> _State:
        state = self._states[growth.ask.request_id]
        assert state is not None
        return state

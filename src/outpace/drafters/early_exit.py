"""Self-speculation: the target's own first E layers draft, on the target's own cache rows.

Zhang et al. "Draft & Verify" 2309.08168, Elhoushi et al. "LayerSkip" 2404.16710, Liu et al. "Kangaroo" 2404.18911. No
second model is in memory. While drafting, the row of every token but the last draft token runs layers [0, E); those
rows and their states at E are kept, so verification runs these layers only for the last draft token and [E, L)
for all.

    rows     t      d1     d2    ...   d_{k-1}    d_k
    [0, E)   draft  draft  draft       draft      verify
    [E, L)   verify for all of them, in one pass

Of a draft that branches the same holds for the nodes that were given children: those that stay come first, moved to the
slots behind the text in which verification expects them; leaves run all layers there.

Ordinary checkpoints seldom agree with their own early layers, so an exit may carry a trained adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outpace.drafters.fed_rows import FedRows
from outpace.drafters.own_rows import (
    Fed,
    Growing,
    OwnRows,
    Rows,
    Tree,
    begin,
    committed_rows,
    draft_rows,
    grow_all,
)
from outpace.protocols import Cache, DrafterNeeds, ExitAdapter, LayeredModel
from outpace.types import Ask, Draft, Observation, Resume, Segment

__all__ = ["EarlyExitDrafter"]


@dataclass(slots=True)
class _State:
    """What the adapter has computed for one request.

    Args:
        lane: in the adapter's cache.
        num_rows: rows [0, num_rows) hold committed positions.
        fed: rows behind them, of draft tokens of the last proposal.
        pending: [n, H] states at the exit of the committed positions behind `num_rows` that it has not computed.
    """

    lane: int
    num_rows: int = 0
    fed: FedRows = field(default_factory=FedRows)
    pending: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(rows.shape[0] for rows in self.pending)


@dataclass(slots=True, kw_only=True)
class _LowerRows(OwnRows):
    """The rows of one proposal in the target's cache, up to the exit.

    Args:
        adapter: what the adapter knows of the request; None if there is no adapter.
        hidden: [1, H] states at the exit, of the last committed token and of the rows of `fed`.
    """

    adapter: _State | None
    hidden: list[torch.Tensor] = field(default_factory=list)


class EarlyExitDrafter:
    """Drafts with layers [0, exit_layer) of the target.

    Args:
        model: the target itself.
        cache: the target's cache.
        exit_layer: layers to run, 1 to num_layers - 1.
        adapter: trained network at this exit; None reads the exit with the target's own final norm and head.
        tree_width: most continuations of a token. More than 1 needs a target that takes trees; drafts for rejection
            sampling are chains all the same.
    """

    name = "early_exit"

    def __init__(
        self,
        model: LayeredModel,
        cache: Cache,
        *,
        exit_layer: int,
        adapter: ExitAdapter | None = None,
        tree_width: int = 1,
    ) -> None:
        assert 1 <= exit_layer < model.num_layers, (exit_layer, model.num_layers)
        assert adapter is None or adapter.exit_layer == exit_layer
        assert tree_width == 1 or (tree_width > 1 and model.takes_trees)
        self.exit_layer = exit_layer
        self.needs = DrafterNeeds(
            aux_layers=() if adapter is None else (exit_layer,),
            computes=True,
            target_rows=True,
            every_row=adapter is not None,  # it has a row of its own for every row of the target
            width=tree_width,
        )
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
            kept = state.fed.along(seen.token_ids[state.num_rows : min(state.num_rows + len(state.fed), end)])
            if kept and kept[-1] >= len(kept):
                self._adapter.cache.compact(state.lane, state.num_rows, [state.num_rows + row for row in kept])
            state.num_rows = min(state.num_rows + len(kept), end)
            state.fed.clear()
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
        growths = [growth for ask in asks if (growth := self._begin(ask)) is not None]
        growths = self._within_budget(growths, row_budget)
        grow_all(growths, 0, self)
        drafts = {growth.ask.request_id: self._draft(growth) for growth in growths}
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        if state is not None:
            assert self._adapter is not None
            self._adapter.cache.release(state.lane)

    def _begin(self, ask: Ask) -> Growing | None:
        """None if the adapter has no room. The rows of a draft are reserved in the target's cache."""
        adapter, first = self._states[ask.request_id], len(ask.token_ids) - 1
        if self._adapter is not None and adapter is None:
            return None
        fed = FedRows() if adapter is None else adapter.fed
        rows = _LowerRows(lane=ask.lane, num_rows=first, fed=fed, adapter=adapter)
        most = first + 1 + ask.num_draft_tokens

        def reserve(lane: int, count: int) -> bool:
            return adapter is None or self._adapter is None or self._adapter.cache.reserve(adapter.lane, count)

        return begin(ask, rows, ask.token_ids[-1:], reserve, most, self.needs.width)

    def _draft(self, growth: Growing) -> Draft:
        if not growth.ids:
            return Draft()
        hidden = _rows_of(growth).hidden
        if not isinstance(growth, Tree):
            return growth.draft("early exit", Resume(self.exit_layer, torch.cat(hidden)))
        front = _front(growth)
        rows, fork = [growth.row_of[node] for node in front], growth.state.num_rows
        self._cache.compact(growth.state.lane, fork, [fork + row for row in rows])
        states = torch.cat([hidden[0], *(hidden[1 + row] for row in rows)])
        nodes = [*front, *(node for node in growth.best() if node not in front)]
        return replace(growth.draft("early exit", nodes), resume=Resume(self.exit_layer, states))

    def feed_committed(self, growths: Sequence[Growing], *, wanted: bool) -> torch.Tensor:
        """See `own_rows.Feeder`; the adapter first computes what it is behind."""
        hidden = self._run_lower_layers(growths, committed_rows(growths))
        if self._adapter is None or not growths:
            return self._model.logits(hidden)
        rows = [[*_adapter_of(growth).pending, _rows_of(growth).hidden[-1]] for growth in growths]
        return self._feed_adapter([(_adapter_of(growth), own) for growth, own in zip(growths, rows, strict=True)])

    def feed_drafts(self, fed: Sequence[Fed]) -> torch.Tensor:
        """See `own_rows.Feeder`."""
        growths, rows = [growth for growth, _ in fed], draft_rows(fed)
        hidden = self._run_lower_layers(growths, rows)
        if self._adapter is None or not fed:
            return self._model.logits(hidden)
        # Row by row the adapter's cache holds what the target's does.
        segments = [
            replace(segment, lane=_adapter_of(growth).lane)
            for growth, segment in zip(growths, rows.segments, strict=True)
        ]
        return self._adapter.logits(
            hidden, rows.positions, segments, torch.arange(len(hidden), dtype=torch.int64, device="cpu")
        )

    def _run_lower_layers(self, growths: Sequence[Growing], rows: Rows) -> torch.Tensor:
        """Rows through [0, E), into the target's own cache. Returns their states [R, H], which are kept."""
        hidden = self._model.embed(rows.ids)
        if not growths:
            return hidden
        hidden = self._model.run_layers(hidden, rows.positions, rows.segments, 0, self.exit_layer, self._cache)
        for growth, segment in zip(growths, rows.segments, strict=True):
            _rows_of(growth).hidden += torch.split(hidden[segment.begin : segment.end], 1)
        return hidden

    def _feed_adapter(self, fed: Sequence[tuple[_State, list[torch.Tensor]]], *, wanted: bool = True) -> torch.Tensor:
        """Runs the adapter over states of committed positions. Returns logits of the last of each, if wanted."""
        assert self._adapter is not None
        hidden: list[torch.Tensor] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for state, states in fed:
            first, count = state.num_rows, sum(rows.shape[0] for rows in states)
            segments.append(Segment(state.lane, len(positions), len(positions) + count, first))
            hidden += states
            positions += range(first, first + count)
            state.num_rows, state.pending = first + count, []
        where = torch.tensor(positions, dtype=torch.int64, device="cpu")
        last = torch.tensor([s.end - 1 for s in segments] if wanted else [], dtype=torch.int64, device="cpu")
        return self._adapter.logits(torch.cat(hidden), where, segments, last)

    def _within_budget(self, growths: Sequence[Growing], row_budget: int) -> list[Growing]:
        """Those whose adapter can catch up with what was committed; another computes what the budget allows."""
        if self._adapter is None:
            return list(growths)
        ready: list[Growing] = []
        for growth in growths:
            state = _adapter_of(growth)
            missing = state.num_pending
            if missing <= row_budget:
                row_budget -= missing
                ready.append(growth)
            elif row_budget:
                rows = torch.cat(state.pending)
                self._feed_adapter([(state, [rows[:row_budget]])], wanted=False)
                state.pending = [rows[row_budget:]]
                row_budget = 0
        return ready


def _rows_of(growth: Growing) -> _LowerRows:
    assert isinstance(growth.state, _LowerRows)
    return growth.state


def _adapter_of(growth: Growing) -> _State:
    state = _rows_of(growth).adapter
    assert state is not None
    return state


def _front(growth: Tree) -> list[int]:
    """The nodes that stay and have a state at the exit, in the order of their rows.

    Without those behind a sibling that has none, since siblings come in the order of their chances.
    """
    front: set[int] = set()
    left_out: set[int] = set()  # nodes with a child, or -1, that is not in front
    for node in sorted(growth.best()):
        parent = growth.parents[node]
        if node in growth.row_of and parent not in left_out and (parent < 0 or parent in front):
            front.add(node)
        else:
            left_out.add(parent)
    return sorted(front, key=growth.row_of.__getitem__)

"""A small model with the target's vocabulary drafts token by token, for all requests at once.

Leviathan et al. 2211.17192, Chen et al. 2302.01318. How a token is drawn from its logits is in `growth.py`, how a draft
branches in `tree_growth.py`.

    target's tokens   t0 t1 ... t_n          committed, t_n not yet computed by the target
    draft cache rows  [0, num_rows)          what the draft model has computed
    a proposal        rows up to t_n (catching up), then d1 .. d_{k-1}; the last draft token is never fed
    after the verdict rows of the committed tokens stay, the rest is rolled back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outpace.drafters.fed_rows import FedRows
from outpace.drafters.growth import Growth, extend
from outpace.drafters.tree_growth import TreeGrowth
from outpace.protocols import Cache, DrafterNeeds, TargetModel
from outpace.types import Ask, Draft, Observation, Pack, Segment

__all__ = ["DraftModelDrafter"]

_BREADTH = 3
"""Most nodes of a tree computed in one pass: so many rows cost the native kernels little more than one."""
_ROWS_A_NODE = 2
"""Rows a tree may compute for every node that is kept in the end."""


@dataclass(slots=True)
class _State:
    """What the draft model has computed for one request.

    Args:
        lane: in the draft cache.
        num_rows: rows [0, num_rows) hold committed tokens.
        fed: rows behind them, of draft tokens of the last proposal.
    """

    lane: int
    num_rows: int = 0
    fed: FedRows = field(default_factory=FedRows)


@dataclass(slots=True, kw_only=True)
class _Chain(Growth):
    """One draft while it grows, to at most `limit` tokens. `rows` are the committed tokens to feed first."""

    state: _State
    limit: int
    rows: Sequence[int]

    def draft_tokens(self) -> list[tuple[int, int]]:
        """(token, row before it) of the draft tokens to feed next; none when it is done."""
        fed = len(self.state.fed)
        return [(self.ids[-1], fed - 1)] if fed < len(self.ids) < self.limit and self.is_worth_more else []


@dataclass(slots=True, kw_only=True)
class _Tree(TreeGrowth):
    """The same for a draft with branches; `asked` are the nodes of the rows that were fed last."""

    state: _State
    rows: Sequence[int]
    max_fed: int
    row_of: dict[int, int] = field(default_factory=lambda: {-1: -1})
    asked: list[int] = field(default_factory=lambda: [-1])

    def take(self, logits: torch.Tensor) -> None:
        """[len(asked), V] logits behind the nodes that were fed."""
        for node, row in zip(self.asked, logits, strict=True):
            self.expand(node, row)

    def draft_tokens(self) -> list[tuple[int, int]]:
        """See `_Chain.draft_tokens`."""
        fed = len(self.state.fed)
        self.asked = self.to_expand(min(_BREADTH, self.max_fed - fed))
        self.row_of.update((node, fed + place) for place, node in enumerate(self.asked))
        return [(self.ids[node], self.row_of[self.parents[node]]) for node in self.asked]


_Any = _Chain | _Tree


class DraftModelDrafter:
    """Runs a second, smaller model with a cache of its own.

    Args:
        model: the draft model; its logits are over the same token ids as the target's.
        cache: its cache, with a lane for every request the engine runs side by side.
        max_model_len: positions the draft model can compute; beyond them it stops drafting.
        weight_bytes: memory of its weights, for the statistics.
        tree_width: most continuations of a token. More than 1 needs a model that takes trees; drafts for rejection
            sampling are chains all the same.
    """

    name = "draft_model"

    def __init__(
        self, model: TargetModel, cache: Cache, *, max_model_len: int, weight_bytes: int = 0, tree_width: int = 1
    ) -> None:
        assert tree_width == 1 or (tree_width > 1 and model.takes_trees)
        self.needs = DrafterNeeds(computes=True, width=tree_width)
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
            # The newest token is always fed again, since its logits are where the next draft starts. Tokens that were
            # accepted but never fed (the last of a chain, a leaf of a tree) are missing, and the next draft catches up.
            kept = state.fed.along(seen.token_ids[state.num_rows : len(seen.token_ids) - 1])
            if kept and kept[-1] >= len(kept):
                self._cache.compact(state.lane, state.num_rows, [state.num_rows + row for row in kept])
            state.num_rows = min(state.num_rows + len(kept), len(seen.token_ids) - 1)
            state.fed.clear()
            self._cache.truncate(state.lane, state.num_rows)

    def rows_behind(self, request_id: int, num_tokens: int) -> int:
        state = self._states[request_id]
        return 0 if state is None else max(0, num_tokens - 1 - state.num_rows)

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        growths = [g for ask in asks if (g := self._begin(ask)) is not None]
        ready = self._catch_up(growths, row_budget)
        logits = self._feed_committed(ready)
        while ready:
            _grow(ready, logits)
            fed = [(growth, tokens) for growth in ready if (tokens := growth.draft_tokens())]
            ready, logits = [growth for growth, _ in fed], self._feed_drafts(fed)
        drafts = {growth.ask.request_id: growth.draft("draft model") for growth in growths}
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        if state is not None:
            self._cache.release(state.lane)

    def _begin(self, ask: Ask) -> _Any | None:
        """Reserves the rows of a draft; None if there is no lane, no room, or the context of this model has ended."""
        state, size = self._states[ask.request_id], len(ask.token_ids)
        limit = min(ask.num_draft_tokens, self._max_len - size + 1)
        if state is None or limit < 1:
            return None
        state.fed.clear()
        rows = ask.token_ids[state.num_rows :]
        width = self.needs.width if ask.width is None else min(self.needs.width, ask.width)
        if width > 1 and ask.coupled:
            most = min(_ROWS_A_NODE * (limit - 1), self._max_len - size)
            if self._cache.reserve(state.lane, size + most):
                return _Tree(ask=ask, limit=limit, width=width, state=state, rows=rows, max_fed=most)
        if not self._cache.reserve(state.lane, size + limit - 1):
            return None
        return _Chain(ask=ask, state=state, limit=limit, rows=rows)

    def _catch_up(self, growths: Sequence[_Any], row_budget: int) -> list[_Any]:
        """Computes what the budget allows of what is missing; returns those that can draft now."""
        ready: list[_Any] = []
        behind: list[_Any] = []
        for growth in growths:
            missing = len(growth.rows) - 1
            if missing <= row_budget:
                row_budget -= missing
                ready.append(growth)
            elif row_budget:
                growth.rows = growth.rows[:row_budget]
                row_budget = 0
                behind.append(growth)
        if behind:
            self._feed_committed(behind, wanted=False)
        return ready

    def _feed_committed(self, growths: Sequence[_Any], *, wanted: bool = True) -> torch.Tensor:
        """Computes committed tokens. Returns the logits [len(growths), V] of the last of each, if wanted."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for growth in growths:
            state, begin = growth.state, len(ids)
            ids += growth.rows
            positions += range(state.num_rows, state.num_rows + len(growth.rows))
            segments.append(Segment(state.lane, begin, len(ids), state.num_rows))
            state.num_rows += len(growth.rows)
        return self._forward(ids, positions, segments, [s.end - 1 for s in segments] if wanted else [])

    def _feed_drafts(self, fed: Sequence[tuple[_Any, list[tuple[int, int]]]]) -> torch.Tensor:
        """Computes draft tokens of each growth, given with the row before each. Returns their logits [R, V]."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for growth, tokens in fed:
            state, begin = growth.state, len(ids)
            fork, first = state.num_rows, len(state.fed)
            rows = [state.fed.add(token, before) for token, before in tokens]
            paths = [tuple(fork + row for row in state.fed.path(row)) for row in rows]
            ids += [token for token, _ in tokens]
            positions += [fork + len(path) - 1 for path in paths]
            straight = int(len(paths[0]) == first + 1)  # the first may follow all that was fed before, as in a chain
            own = tuple(paths[straight:])
            segments.append(Segment(state.lane, begin, len(ids), fork + first, fork if own else 0, own))
        return self._forward(ids, positions, segments, list(range(len(ids))))

    def _forward(
        self, ids: list[int], positions: list[int], segments: Sequence[Segment], wanted: list[int]
    ) -> torch.Tensor:
        if not ids:
            return torch.empty(0, self._model.vocab_size, dtype=torch.float32, device="cpu")
        pack = Pack(
            ids=torch.tensor(ids, dtype=torch.int64, device="cpu"),
            positions=torch.tensor(positions, dtype=torch.int64, device="cpu"),
            segments=tuple(segments),
            logits_rows=torch.tensor(wanted, dtype=torch.int64, device="cpu"),
        )
        return self._model.forward(pack, self._cache).logits


def _grow(growths: Sequence[_Any], logits: torch.Tensor) -> None:
    """Draws draft tokens behind the rows that were just computed, one of a chain and several of a tree."""
    chains: list[_Chain] = []
    rows: list[int] = []
    begin = 0
    for growth in growths:
        if isinstance(growth, _Chain):
            chains.append(growth)
            rows.append(begin)
            begin += 1
        else:
            growth.take(logits[begin : begin + len(growth.asked)])
            begin += len(growth.asked)
    if chains:
        extend(chains, logits if len(rows) == len(logits) else logits[rows])

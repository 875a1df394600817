"""A small model with the target's vocabulary drafts token by token, for all requests at once.

Leviathan et al. 2211.17192, Chen et al. 2302.01318. How a token is drawn from its logits is in `growth.py`, how a draft
branches in `tree_growth.py`, which rows are fed in `own_rows.py`.

    target's tokens   t0 t1 ... t_n          committed, t_n not yet computed by the target
    draft cache rows  [0, num_rows)          what the draft model has computed
    a proposal        rows up to t_n (catching up), then d1 .. d_{k-1}; the last draft token is never fed
    after the verdict rows of the committed tokens stay, the rest is rolled back
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.drafters.own_rows import Fed, Growing, OwnRows, Rows, begin, committed_rows, draft_rows, grow_all
from outpace.protocols import Cache, DrafterNeeds, TargetModel
from outpace.types import Ask, Draft, Observation, Pack

__all__ = ["DraftModelDrafter"]


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
        self._states: dict[int, OwnRows | None] = {}  # None: no lane was free, so nothing is drafted

    @property
    def memory_bytes(self) -> int:
        return self._weight_bytes + self._cache.bytes_in_use

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        lane = self._cache.allocate()
        self._states[request_id] = None if lane is None else OwnRows(lane)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keeps the rows of what was committed and rolls back the rest, in O(draft length)."""
        for seen in observations:
            state = self._states[seen.request_id]
            if state is None:
                continue
            # The newest token is always fed again, since its logits are where the next draft starts. Tokens that were
            # accepted but never fed (the last of a chain, a leaf of a tree) are missing, and the next draft catches up.
            end = min(state.num_rows + len(state.fed), len(seen.token_ids) - 1)
            kept = state.fed.along(seen.token_ids[state.num_rows : end])
            if kept and kept[-1] >= len(kept):
                self._cache.compact(state.lane, state.num_rows, [state.num_rows + row for row in kept])
            state.num_rows = min(state.num_rows + len(kept), len(seen.token_ids) - 1)
            state.fed.clear()
            self._cache.truncate(state.lane, state.num_rows)

    def rows_behind(self, request_id: int, num_tokens: int) -> int | None:
        state = self._states[request_id]
        if state is None or num_tokens > self._max_len:
            return None
        return max(0, num_tokens - 1 - state.num_rows)

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        growths = [g for ask in asks if (g := self._begin(ask)) is not None]
        grow_all(growths, row_budget, self)
        drafts = {growth.ask.request_id: growth.draft("draft model") for growth in growths}
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def release(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        if state is not None:
            self._cache.release(state.lane)

    def _begin(self, ask: Ask) -> Growing | None:
        """None if there is no lane, no room, or the context of this model has ended."""
        state = self._states[ask.request_id]
        if state is None:
            return None
        return begin(ask, state, ask.token_ids[state.num_rows :], self._cache.reserve, self._max_len, self.needs.width)

    def feed_committed(self, growths: Sequence[Growing], *, wanted: bool) -> torch.Tensor:
        """See `own_rows.Feeder`."""
        rows = committed_rows(growths)
        return self._forward(rows, [s.end - 1 for s in rows.segments] if wanted else [])

    def feed_drafts(self, fed: Sequence[Fed]) -> torch.Tensor:
        """See `own_rows.Feeder`."""
        rows = draft_rows(fed)
        return self._forward(rows, list(range(len(rows.ids))))

    def _forward(self, rows: Rows, wanted: list[int]) -> torch.Tensor:
        if not len(rows.ids):
            return torch.empty(0, self._model.vocab_size, dtype=torch.float32, device="cpu")
        pack = Pack(
            ids=rows.ids,
            positions=rows.positions,
            segments=rows.segments,
            logits_rows=torch.tensor(wanted, dtype=torch.int64, device="cpu"),
        )
        return self._model.forward(pack, self._cache).logits

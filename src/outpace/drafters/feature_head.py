"""A head on the target's own states drafts token by token: EAGLE-3 (2503.01840), or a checkpoint's own MTP layer.

    target's tokens   t0 t1 ... t_{n-1}      committed, the last not yet computed by the target
    its states        s0 s1 ... s_{n-2}      at three layers, or behind the last, told by `observe`
    rows of the head  (t1, s0) (t2, s1) ... (t_{n-1}, s_{n-2})      the last one guesses t_n
    a proposal        what is missing of these, then (d1, h) (d2, h') ..., h being what the row before put out
    after the verdict rows of draft tokens go: they were made of guessed features, and the true ones are there now

Where the target's rows were computed for another request (a common prefix), no states come. What the head knows of that
other text is taken over then, if it is still there; a row that is missing can only change how often the head is right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from outpace.common_length import common_length
from outpace.drafters.head_rows import HeadRows
from outpace.drafters.own_rows import Fed, Growing, Rows, begin, committed_rows, draft_rows, grow_all
from outpace.protocols import Cache, DrafterNeeds, FeatureHead
from outpace.types import Ask, Draft, Observation

__all__ = ["FeatureHeadDrafter"]

_SHORTEST = 16
"""Fewest rows worth keeping, or taking over."""
_MOST_KEPT = 64
"""States that wait to become rows, of a request that is gone: more than one proposal leaves."""


class FeatureHeadDrafter:
    """Runs such a head with a cache of its own.

    Args:
        name: of the method.
        head: the head.
        cache: its cache, with a lane for every request the engine runs side by side.
        tree_width: most continuations of a token; more than 1 needs a target that takes trees. Drafts for rejection
            sampling are chains all the same.
    """

    def __init__(self, name: str, head: FeatureHead, cache: Cache, *, tree_width: int = 1) -> None:
        self.name = name
        self.needs = DrafterNeeds(head.aux_layers, computes=True, width=tree_width)
        self._head = head
        self._cache = cache
        self._running: dict[int, HeadRows | None] = {}  # None: no lane was free, so nothing is drafted
        self._kept: OrderedDict[int, HeadRows] = OrderedDict()  # of requests that are gone, the oldest first

    @property
    def memory_bytes(self) -> int:
        known = [*self._running.values(), *self._kept.values()]
        waiting = sum(state.waiting_bytes for state in known if state is not None)
        return self._head.weight_bytes + self._cache.bytes_in_use + waiting

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        lane = self._cache.allocate()
        if lane is None and self._kept:
            self._give_up_oldest()
            lane = self._cache.allocate()
        self._running[request_id] = None if lane is None else HeadRows(lane)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Collects the states of what was committed and forgets the rows of draft tokens."""
        for seen in observations:
            state = self._running[seen.request_id]
            if state is None:
                continue
            state.tokens += seen.token_ids[len(state.tokens) :]
            self._forget_drafts(state)
            first = seen.first_position
            if first > 0 and not state.known_end:
                self._take_over(state, first)
            assert first >= state.known_end, "states of a position come once"
            state.add(first, torch.cat([seen.aux[layer] for layer in self.needs.aux_layers], -1))

    def rows_behind(self, request_id: int, num_tokens: int) -> int | None:
        state = self._running[request_id]
        if state is None or not state.waiting or state.num_rows + len(state.waiting) > self._cache.capacity:
            return None
        return len(state.waiting) - 1

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        growths = [g for ask in asks if (g := self._begin(ask)) is not None]
        grow_all(growths, row_budget, self)
        drafts = {growth.ask.request_id: growth.draft(self.name) for growth in growths}
        return [drafts.get(ask.request_id, Draft()) for ask in asks]

    def release(self, request_id: int) -> None:
        state = self._running.pop(request_id)
        if state is None:
            return
        if state.num_rows < _SHORTEST:  # states alone would take much memory for a head that is seldom asked
            self._cache.release(state.lane)
            return
        self._forget_drafts(state)
        state.drop_waiting(_MOST_KEPT)
        for key, other in list(self._kept.items()):
            if common_length(other.tokens, state.tokens, len(other.tokens)) == len(other.tokens):
                self._cache.release(self._kept.pop(key).lane)
        self._kept[request_id] = state

    # Texts that begin alike.

    def _take_over(self, state: HeadRows, known: int) -> None:
        """What is known of the text of another that begins with the same `known` tokens, the more the better."""
        most, best = _SHORTEST - 1, None
        for other in (*self._running.values(), *self._kept.values()):
            if other is not None and other is not state:
                common = common_length(other.tokens, state.tokens, len(state.tokens))
                rows, waiting = other.usable(common, min(known, common))
                if rows + waiting > most:
                    most, best = rows + waiting, (other, rows, waiting)
        if best is None:
            return
        other, rows, waiting = best
        if rows and not self._reserve(state.lane, rows, keep=other):
            return
        if rows:
            self._cache.copy(other.lane, state.lane, rows)
        state.inherit(other, rows, waiting)

    def _reserve(self, lane: int, rows: int, keep: HeadRows | None = None) -> bool:
        """Room for rows of a lane, made by giving up kept ones if need be, but not `keep`."""
        while not self._cache.reserve(lane, rows):
            if not self._kept or next(iter(self._kept.values())) is keep:
                return False
            self._give_up_oldest()
        return True

    def _give_up_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._cache.release(oldest.lane)

    def _forget_drafts(self, state: HeadRows) -> None:
        state.fed.clear()
        state.outputs.clear()
        self._cache.truncate(state.lane, state.num_rows)

    # Drafting.

    def _begin(self, ask: Ask) -> Growing | None:
        """None if there is no lane or no room, or nothing new to begin from."""
        state = self._running[ask.request_id]
        if state is None or not state.waiting:
            return None
        rows = [ask.token_ids[position + 1] for position in state.waiting]
        return begin(ask, state, rows, self._reserve, self._cache.capacity, self.needs.width)

    def feed_committed(self, growths: Sequence[Growing], *, wanted: bool) -> torch.Tensor:
        """See `own_rows.Feeder`."""
        rows = committed_rows(growths)
        if not growths:
            return self._forward(rows, None, [])[0]
        known = [_known(growth) for growth in growths]
        states = torch.cat([state.take(len(growth.rows)) for growth, state in zip(growths, known, strict=True)])
        last = [segment.end - 1 for segment in rows.segments] if wanted else []
        logits, outputs = self._forward(rows, self._head.fuse(states), last)
        if wanted:
            for state, output in zip(known, torch.split(outputs, 1), strict=True):
                state.root = output
        return logits

    def feed_drafts(self, fed: Sequence[Fed]) -> torch.Tensor:
        """See `own_rows.Feeder`."""
        features: list[torch.Tensor] = []
        for growth, tokens in fed:
            state = _known(growth)
            assert state.root is not None
            features += [state.root if before < 0 else state.outputs[before] for _, before in tokens]
        rows = draft_rows(fed)
        logits, outputs = self._forward(rows, torch.cat(features) if features else None, list(range(len(rows.ids))))
        for (growth, _), segment in zip(fed, rows.segments, strict=True):
            _known(growth).outputs += torch.split(outputs[segment.begin : segment.end], 1)
        return logits

    def _forward(
        self, rows: Rows, features: torch.Tensor | None, wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if features is None:
            nothing = torch.empty(0, self._head.vocab_size, dtype=torch.float32, device="cpu")
            return nothing, nothing
        last = torch.tensor(wanted, dtype=torch.int64, device="cpu")
        return self._head.forward(rows.ids, features, rows.positions, rows.segments, last, self._cache)


def _known(growth: Growing) -> HeadRows:
    assert isinstance(growth.state, HeadRows)
    return growth.state

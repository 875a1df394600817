"""Rows that outlive their request, for requests whose text begins in the same way: the next turn of a conversation.

A row depends on the tokens up to its own and on nothing else, and has the same bits in every pack, so it does not
matter who computed it: reuse saves time and cannot change text. A lane whose request has gone is kept, with the tokens
of its rows. The next request takes over the lane with the longest common beginning; or gets a copy, if the lane holds
more than that, which somebody else may come back for, or belongs to a running request.

Kept rows are nobody's place: they count as free for admission, and are given up, least recently used first and from
their end, when rows or lanes are needed, before anybody is preempted and before a draft is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outpace.common_length import common_length
from outpace.engine.request import Request
from outpace.protocols import Cache

__all__ = ["SHORTEST", "WORTH_WAITING", "Match", "Prefixes"]

SHORTEST = 4
"""Fewest tokens to reuse: copying some rows costs about as much as computing a few, and every text begins with BOS."""
WORTH_WAITING = 64
"""Rows, about to be computed by somebody else, for whose sake a request waits instead of computing them as well."""
_SHRINK = 128
"""Fewest rows given up at a time, since each time costs some calls a layer."""


@dataclass(frozen=True, slots=True)
class Match:
    """The lane that helps a request most.

    Args:
        lane: whose first rows are the request's own; None if there is none.
        num_tokens: how many of them, less than the request has tokens: one row must be computed.
        num_lost: rows behind them that would be lost by taking the lane over; None if a running request holds it.
        num_coming: common tokens with the running request that has most of them, computed or soon to be.
    """

    lane: int | None = None
    num_tokens: int = 0
    num_lost: int | None = None
    num_coming: int = 0

    @property
    def is_worth_waiting(self) -> bool:
        """Whether a running request is about to compute many more rows of this text than there are now."""
        return self.num_coming - self.num_tokens >= WORTH_WAITING


class Prefixes:
    """Lanes of requests that have gone, least recently used first.

    Args:
        cache: the target's.
        enabled: False keeps nothing and finds nothing.
        every_row: names of drafters that must observe all rows of a prompt, whose requests therefore reuse nothing.
    """

    def __init__(self, cache: Cache, *, enabled: bool, every_row: Collection[str] = ()) -> None:
        self._cache = cache
        self._enabled = enabled
        self._every_row = frozenset(every_row)
        self._kept: OrderedDict[int, list[int]] = OrderedDict()
        self.queries = 0  # prompt tokens of requests that were allowed to reuse rows
        self.hits = 0  # those of them whose rows were there

    @property
    def num_rows(self) -> int:
        """Rows in kept lanes: as good as free."""
        return sum(map(len, self._kept.values()))

    @property
    def lanes(self) -> Collection[int]:
        """Kept lanes, least recently used first."""
        return self._kept.keys()

    def observed_by(self, every_row: Collection[str]) -> None:
        """Other drafters are loaded; see the arguments of the class."""
        self._every_row = frozenset(every_row)

    # Looking for rows.

    def find(self, request: Request, running: Sequence[Request]) -> Match:
        """What there is for a request that waits for a lane, in time O(lanes x common tokens).

        Of lanes with equally many common tokens comes first one that holds nothing more, then the least recently used.
        """
        if not self._may_reuse(request):
            return Match()
        ids, most = request.token_ids, len(request.token_ids) - 1
        found: list[Match] = []
        for lane, kept in self._kept.items():
            common = common_length(kept, ids, most)
            found.append(Match(lane, common, num_lost=len(kept) - common))
        coming = 0
        for other in running:
            common = common_length(other.token_ids, ids, most)
            found.append(Match(other.lane, min(common, other.num_computed)))
            # One whose log probabilities are wanted computes its prompt slowly.
            if other.params.prompt_logprobs is None:
                coming = max(coming, common)
        best = max(found, key=lambda m: (m.num_tokens, _loses_little(m)), default=Match())
        if best.num_tokens < SHORTEST:
            best = Match()
        return Match(best.lane, best.num_tokens, best.num_lost, coming)

    def _may_reuse(self, request: Request) -> bool:
        """Log probabilities of a prompt, and some drafters, take all of its rows to be computed."""
        return (
            self._enabled
            and request.params.prompt_logprobs is None
            and self._every_row.isdisjoint(request.plan.drafters)
        )

    def count(self, request: Request, num_tokens: int) -> None:
        """Books what the first admission of a request found; a second one, after preemption, counts no more."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_tokens
            if self._may_reuse(request):
                self.queries += request.num_prompt_tokens
                self.hits += num_tokens

    # Taking lanes.

    def lane_for(self, match: Match, num_tokens: int) -> int:
        """A lane for a request of `num_tokens` tokens: the match itself, to be taken over, or one without rows.

        The match is copied if others may come back for what it holds and there is room for both.
        """
        lane = None if match.lane in self._kept and _loses_little(match) else self._cache.allocate()
        oldest = next(iter(self._kept), None)
        if match.num_lost is not None:
            assert match.lane is not None
            room = self._cache.free_rows + self.num_rows - match.num_tokens - match.num_lost
            if _loses_little(match) or room <= num_tokens or (lane is None and match.lane == oldest):
                if lane is not None:
                    self._cache.release(lane)
                return match.lane
        if lane is None:
            assert oldest is not None, "more requests run side by side than the cache has lanes"
            self._give_up(oldest)
            lane = self._cache.allocate()
            assert lane is not None
        return lane

    def fill(self, lane: int, match: Match) -> int:
        """Brings the common rows to the lane that `lane_for` gave. Returns how many it holds now."""
        if match.lane is None:
            return 0
        if match.lane == lane:
            del self._kept[lane]
            self._cut(lane, match.num_tokens)
            return match.num_tokens
        if match.lane in self._kept:
            self._kept.move_to_end(match.lane)
        if not self.make_room(match.num_tokens) or not self._cache.reserve(lane, match.num_tokens):
            return 0
        self._cache.copy(match.lane, lane, match.num_tokens)
        return match.num_tokens

    # Keeping lanes and giving them up.

    def keep(self, lane: int, token_ids: list[int]) -> None:
        """Takes over the lane of a request that has gone, with rows of these tokens; what they add nothing to goes."""
        self._kept.pop(lane, None)  # if its request was interrupted while it took this lane over
        useful = self._enabled and len(token_ids) >= SHORTEST
        for other, kept in list(self._kept.items()) if useful else ():
            common = common_length(kept, token_ids, len(kept))
            if common == len(token_ids):
                self._kept.move_to_end(other)
                useful = False
                break
            if common == len(kept):
                self._give_up(other)
        if not useful:
            self._cache.release(lane)
            return
        self._cut(lane, len(token_ids))
        self._kept[lane] = token_ids

    def make_room(self, rows: int) -> bool:
        """Gives up what it takes for so many rows to be free. False if that is not enough."""
        while (missing := rows - self._cache.free_rows) > 0:
            if not self._kept:
                return False
            lane, kept = next(iter(self._kept.items()))
            left = len(kept) - max(missing, _SHRINK)
            if left < SHORTEST:
                self._give_up(lane)
            else:
                del kept[left:]
                self._cut(lane, left)
        return True

    def clear(self) -> None:
        """Gives up everything."""
        for lane in list(self._kept):
            self._give_up(lane)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raises AssertionError if a kept lane is somebody's, or too short to be kept."""
        held = {request.lane for request in running}
        assert not held & self._kept.keys(), (held, list(self._kept))
        assert all(len(kept) >= SHORTEST for kept in self._kept.values()), {k: len(v) for k, v in self._kept.items()}
        assert self._enabled or not self._kept, list(self._kept)

    def _give_up(self, lane: int) -> None:
        del self._kept[lane]
        self._cache.release(lane)

    def _cut(self, lane: int, rows: int) -> None:
        """The lane has these rows and no more; nothing of what was behind them can be read."""
        self._cache.truncate(lane, rows)
        self._cache.trim(lane)


def _loses_little(match: Match) -> bool:
    return match.num_lost is not None and match.num_lost < SHORTEST

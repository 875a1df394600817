"""Which drafts may branch: those whose branches have paid, those nobody knows yet, and one now and then of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.control.branches import Ranked
from outpace.control.knowledge import Knowledge
from outpace.control.widths import LEAST_GAIN, gain_of
from outpace.decisions import Offer

__all__ = ["Branching", "row_price"]


class Branching:
    """Who is asked for branches, and what they bring.

    Args:
        knowledge: what is learnt.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self.now = 0
        """Steps with decoding requests so far."""
        self._open: dict[int, tuple[str, int]] = {}
        self._looked_at: set[str] = set()

    def pays(self, request_id: int, drafter: str, decoding: int) -> bool | None:
        """Whether branches bring this request more than they cost; None if that is to be looked at now."""
        gain = self._knowledge.branch_gain(request_id, drafter, decoding)
        if gain is not None and gain > LEAST_GAIN:
            return True
        if gain is None or self._knowledge.branch_pace(drafter).due <= self.now:
            return None
        return False

    def asked(self, request_id: int, drafter: str, most: int) -> None:
        """A draft of at most so many tokens may branch."""
        self._open[request_id] = drafter, most

    def end_step(self, now: int) -> None:
        """What was asked for in it and did not come does not count; the next one is step `now`."""
        self._open.clear()
        self._looked_at.clear()
        self.now = now

    def look_at(self, offer: Offer, found: Ranked, decoding: int, row: float, call: float = 0.0) -> None:
        """A draft that was free to branch is there: what it gains is noted, once.

        Args:
            offer: the draft, uncut.
            found: its chances.
            decoding: requests that get a token each in the step.
            row: tokens that a row costs.
            call: tokens that a pass of the drafter costs for one of them.
        """
        drafter, most = self._open.get(offer.request_id, ("", 0))
        if drafter != offer.drafter:
            return
        del self._open[offer.request_id]
        gain, depth = 0.0, offer.num_tokens
        if found.order is not None:
            more = self._behind(offer, found.spine, most) if offer.num_tokens >= most else ()
            gain, depth = gain_of(found.survival, found.spine, row, more=more, call=call), len(found.spine)
        if call:
            gain -= (self._knowledge.costs(drafter).wide - 1.0) * call * depth
        own = self._knowledge.requests[offer.request_id].branches_of(drafter)
        for books in (own, self._knowledge.branches_of(drafter)):
            books.add(decoding, gain)
        if gain > LEAST_GAIN or drafter not in self._looked_at:  # a step is one try, however many requests are in it
            self._knowledge.branch_pace(drafter).tried(self.now, gain > LEAST_GAIN)
        self._looked_at.add(drafter)

    def _behind(self, offer: Offer, spine: Sequence[float], most: int) -> list[float]:
        """Chances of the tokens that a chain as long as the draft would have had behind these."""
        acceptance = self._knowledge.acceptance(offer.drafter)
        average = [1.0, *acceptance.average_survival(most, self._knowledge.own(offer.request_id, offer.drafter))]
        scale = (spine[-1] if spine else 1.0) / average[len(spine)]
        return [scale * chance for chance in average[len(spine) + 1 :]]


def row_price(seconds: Sequence[float], count: int, tokens: float, total: float) -> float:
    """Tokens that a row costs around `count` draft tokens, in a step that brings so many tokens in so many seconds."""
    low, high = max(0, count - 2), min(len(seconds) - 1, count + 2)
    return (seconds[high] - seconds[low]) / (high - low) * tokens / total if high > low else 0.0

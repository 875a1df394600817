"""A controller that decides nothing: all that was wished for, in every step."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.control.report import Tally
from outpace.decisions import Allotment, ControlReport, Offer, Selection, StepFacts, Wish

__all__ = ["FixedController"]


class FixedController:
    """Implements `outpace.protocols.Controller`: the free drafter's draft, else the first computing one's.

    Nothing is ever cut. For measurements, and for engines that are put together by hand.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._steps = 0
        self._seconds = 0.0

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        """All that is wished for."""
        return [wish.most for wish in wishes]

    def width(self, wish: Wish, decoding: int) -> int:
        """All that it is made for."""
        return 1 if wish.free is None else wish.widths.get(wish.free, 1)

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        """The draft at hand as it is; where there is none, as much as may be from the first computing drafter."""
        allotments = []
        for wish, offer in zip(wishes, offers, strict=True):
            if offer is not None and offer.num_tokens:
                allotments.append(Allotment(keep=min(offer.num_tokens, wish.most)))
            elif wish.computing and wish.most:
                drafter = next(iter(wish.computing))
                width = wish.widths.get(drafter, 1)
                allotments.append(Allotment(drafter=drafter, num_tokens=wish.most, width=width))
            else:
                allotments.append(Allotment())
        return allotments

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[Selection]:
        """Everything."""
        return [offer.num_tokens for offer in offers]

    def calibrated(
        self, request_id: int, drafter: str, position: int, confidence: float, before: Sequence[float] = ()
    ) -> float:
        """What the drafter says."""
        return confidence

    def observe(self, facts: StepFacts) -> None:
        """Counts, and learns nothing."""
        for seen in facts.drafts:
            tally = self._tallies.setdefault(seen.offer.drafter, Tally())
            tally.drafts += 1
            tally.tokens += seen.offer.num_tokens
            tally.accepted += seen.num_accepted
        for call in facts.calls:
            self._tallies.setdefault(call.drafter, Tally()).drafting += call.seconds
        if facts.decoding:
            self._steps += 1
            self._seconds += facts.seconds + sum(call.seconds for call in facts.calls)

    def abandon(self) -> None:
        """Nothing is known of steps."""

    def release(self, request_id: int) -> None:
        """Nothing is known of requests."""

    def restart_report(self) -> None:
        """Counts begin anew."""
        self._tallies, self._steps, self._seconds = {}, 0, 0.0

    def forget(self, drafter: str, relative_cost: float | None = None) -> None:
        """Nothing was learnt."""

    def report(self) -> ControlReport:
        """Counts since the start; nothing was expected or predicted."""
        drafters = {name: tally.report(name) for name, tally in self._tallies.items()}
        return ControlReport(drafters, self._steps, self._seconds, 0.0)

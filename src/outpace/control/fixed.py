"""As much as is possible: for experiments, and for engines that are put together by hand."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.decisions import Allotment, ControlReport, Offer, StepFacts, Wish

__all__ = ["FixedController"]


class FixedController:
    """Verifies every draft whole. Where the free drafter has none, the first computing one is asked for all it may."""

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        return [wish.most for wish in wishes]

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        return [_whole(wish, offer) for wish, offer in zip(wishes, offers, strict=True)]

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[int]:
        return [offer.num_tokens for offer in offers]

    def calibrated(self, request_id: int, drafter: str, position: int, confidence: float) -> float:
        return confidence

    def observe(self, facts: StepFacts) -> None:
        """There is nothing to learn."""

    def release(self, request_id: int) -> None:
        """There is nothing to forget."""

    def report(self) -> ControlReport:
        return ControlReport({}, 0, 0.0, 0.0)


def _whole(wish: Wish, offer: Offer | None) -> Allotment:
    if offer is not None and offer.num_tokens:
        return Allotment(keep=offer.num_tokens)
    drafter = next(iter(wish.computing), None)
    return Allotment() if drafter is None else Allotment(drafter=drafter, num_tokens=wish.most)

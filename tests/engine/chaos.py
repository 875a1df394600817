"""A controller that decides at random, as badly as the protocol allows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outpace.decisions import Allotment, ControlReport, Offer, Selection, StepFacts, Wish

__all__ = ["ChaosController"]


class ChaosController:
    """Switches drafters, cuts drafts and gives them up by the throw of a die. Checks what it is told.

    Args:
        seed: of the die.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._kept: dict[int, int] = {}
        self._open = False
        self.known: set[int] = set()
        self.widths: set[int] = set()
        self.chosen: dict[str | None, int] = {}
        self.facts: list[StepFacts] = []

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        assert other_rows >= other_decoding >= 0 and wishes
        for wish in wishes:
            assert wish.most >= 1 and wish.remaining > wish.most and (wish.free or wish.computing)
            assert all(rows >= 0 for rows in wish.computing.values())
        return [self._up_to(wish.most) if self._random.random() < 0.3 else wish.most for wish in wishes]

    def width(self, wish: Wish, decoding: int) -> int:
        assert wish.free is not None and wish.widths[wish.free] > 1 and decoding >= 1
        return self._width(wish.widths[wish.free])

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        assert other_rows >= other_decoding >= 0
        self._kept = {}
        return [self._allotment(wish, offer) for wish, offer in zip(wishes, offers, strict=True)]

    def _allotment(self, wish: Wish, offer: Offer | None) -> Allotment:
        assert offer is None or (offer.request_id == wish.request_id and 1 <= offer.num_tokens <= wish.most)
        if wish.computing and self._random.random() < 0.5:
            drafter = self._random.choice(sorted(wish.computing))
            self.chosen[drafter] = self.chosen.get(drafter, 0) + 1
            width = self._width(wish.widths.get(drafter, 1))
            self.widths.add(width)
            return Allotment(drafter=drafter, num_tokens=self._up_to(wish.most), width=width)
        if offer is None:
            return Allotment()
        self.chosen[offer.drafter] = self.chosen.get(offer.drafter, 0) + 1
        keep = self._some_of(offer)
        self._kept[wish.request_id] = keep if isinstance(keep, int) else len(keep)
        return Allotment(keep=keep)

    def _some_of(self, offer: Offer) -> Selection:
        """The first tokens, or any subtree."""
        if offer.fixed:
            return offer.num_tokens
        if offer.parents is None or self._random.random() < 0.3:
            return self._up_to(offer.num_tokens)
        kept: list[int] = []
        for node, parent in enumerate(offer.parents):
            if (parent < 0 or parent in kept) and self._random.random() < 0.85:
                kept.append(node)
        return tuple(kept)

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[Selection]:
        assert other_rows >= other_decoding >= 0
        for offer in offers:
            assert offer.num_tokens >= 1 and offer.num_tokens <= self._kept.get(offer.request_id, offer.num_tokens)
            assert offer.confidence is None or len(offer.confidence) == offer.num_tokens
        return [self._some_of(offer) for offer in offers]

    def calibrated(
        self, request_id: int, drafter: str, position: int, confidence: float, before: Sequence[float] = ()
    ) -> float:
        assert 0.0 <= confidence <= 1.0 and all(0.0 <= other <= 1.0 for other in before)
        return confidence

    def observe(self, facts: StepFacts) -> None:
        self.known.update(facts.decoding)
        drafted = [seen.offer.request_id for seen in facts.drafts]
        assert len(set(drafted)) == len(drafted) and set(drafted) <= set(facts.decoding)
        assert all(0 <= seen.num_accepted <= seen.offer.num_tokens for seen in facts.drafts)
        assert facts.prefill_rows >= 0 and facts.seconds > 0
        assert facts.lookups > 0 if facts.drafts or facts.calls else facts.lookups >= 0
        self.facts.append(facts)

    def abandon(self) -> None:
        self._kept = {}

    def release(self, request_id: int) -> None:
        self.known.discard(request_id)

    def restart_report(self) -> None:
        self.facts.clear()

    def report(self) -> ControlReport:
        return ControlReport({}, len(self.facts), 0.0, 0.0)

    def _width(self, most: int) -> int:
        return most if self._random.random() < 0.5 else self._random.randint(1, most)

    def _up_to(self, most: int) -> int:
        return self._random.randint(0, most)

"""What was decided in the step under way, for the decisions behind it and to compare with what came."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.control.allocation import allocate
from outpace.control.branches import selected, size
from outpace.control.branching import Branching, row_price
from outpace.control.choosing import Choice, Surroundings
from outpace.control.knowledge import Knowledge
from outpace.decisions import Allotment, Offer, Selection, Wish

__all__ = ["StepPlan"]


class StepPlan:
    """One step.

    Attributes:
        asked: by request, the allotment of a computing drafter.
        behind: by drafter that is asked, rows that it has to compute before.
        probes: requests whose drafts are probes.
        whole: requests whose drafts are verified whatever they promise, since they are made to learn from.
        drafting: seconds that calls are expected to take.
        delay: seconds of catching up that are not in these, since later steps bear them: an investment.
        num_drafted: draft tokens that are expected to be verified.
        expected: by request, the draft tokens that are expected to be kept.
        calls: by drafter, seconds that a pass of it takes for one request.
        values: by request, what a token of it counts; None where that is 1 for all.
        total: seconds expected of the step, drafting included; None of one that was not planned, since it is plain.
    """

    __slots__ = (
        "asked",
        "behind",
        "calls",
        "delay",
        "drafting",
        "expected",
        "num_drafted",
        "probes",
        "total",
        "values",
        "whole",
    )

    def __init__(self) -> None:
        self.asked: dict[int, Allotment] = {}
        self.behind: dict[str, int] = {}
        self.probes: set[int] = set()
        self.whole: set[int] = set()
        self.drafting = self.delay = 0.0
        self.num_drafted = 0
        self.total: float | None = None
        self.values: dict[int, float] | None = None
        self.expected: dict[int, float] = {}
        self.calls: dict[str, float] = {}

    def foresee(
        self,
        choice: Choice,
        wishes: Sequence[Wish],
        allotments: Sequence[Allotment],
    ) -> None:
        """Notes who was asked, what the drafts at hand promise, and how long all of it takes."""
        self.total = choice.seconds[min(self.num_drafted, len(choice.seconds) - 1)] + self.drafting
        for wish, survival, allotment in zip(wishes, choice.survivals, allotments, strict=True):
            name = allotment.drafter
            if name is not None:
                self.asked[wish.request_id] = allotment
                self.behind[name] = self.behind.get(name, 0) + wish.computing[name]
            elif allotment.keep:
                self.expected[wish.request_id] = sum(survival[: size(allotment.keep)])

    def keep(
        self, knowledge: Knowledge, branching: Branching, around: Surroundings, offers: Sequence[Offer]
    ) -> list[Selection]:
        """What of every draft is worth verifying."""
        found = [knowledge.ranked(offer) for offer in offers]
        survivals = [each.survival for each in found]
        whole = [offer.num_tokens if offer.fixed or offer.request_id in self.whole else 0 for offer in offers]
        seconds = knowledge.step_seconds(around.rows, around.prompt_rows, sum(offer.num_tokens for offer in offers))
        if self.drafting:
            seconds = [value + self.drafting for value in seconds]
        values = None if self.values is None else [self.values.get(offer.request_id, 1.0) for offer in offers]
        limits = knowledge.limits([offer.request_id for offer in offers], around.decoding, seconds[0] - self.drafting)
        if limits is not None:  # what has been drafted is paid for, whatever of it is verified
            limits = limits.later(self.drafting)
        plan = allocate(survivals, seconds, decoding=around.decoding, at_least=whole, values=values, limits=limits)
        self.total = plan.seconds
        row = row_price(seconds, sum(plan.counts), plan.tokens, plan.seconds)
        for offer, each, count in zip(offers, found, plan.counts, strict=True):
            self.expected[offer.request_id] = sum(each.survival[:count])
            branching.look_at(offer, each, around.decoding, row, self.calls.get(offer.drafter, 0.0) * plan.rate)
            self._look_at(knowledge, offer, each.survival, count)
        return [selected(each.order, count) for each, count in zip(found, plan.counts, strict=True)]

    def _look_at(self, knowledge: Knowledge, offer: Offer, survival: Sequence[float], count: int) -> None:
        """Learns from a computed draft what its verification cannot tell."""
        asked = self.asked.get(offer.request_id)
        if asked is None or asked.drafter != offer.drafter or offer.confidence is None or offer.fixed:
            return
        if offer.num_tokens < asked.num_tokens and survival and survival[-1] < asked.stop_below:
            knowledge.costs(offer.drafter).stops = True
        if count < offer.num_tokens and offer.parents is None:  # of a tree more is known than was verified
            own = knowledge.own(offer.request_id, offer.drafter)
            knowledge.acceptance(offer.drafter).suppose(count, offer.confidence, own)

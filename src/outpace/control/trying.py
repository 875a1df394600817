"""Probes of drafts: one token now and then where drafting does not seem to pay."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import replace

from outpace.control.branches import size
from outpace.control.choosing import Choice
from outpace.control.knowledge import Knowledge
from outpace.control.probing import Pace, ProbingBudget
from outpace.control.step import StepPlan
from outpace.decisions import Allotment, Offer, Wish

__all__ = ["Trying"]

_REQUESTS_A_PROBE = 8
"""In a step, for every so many requests one may be tried."""


class Trying:
    """Who is tried when.

    Args:
        knowledge: what is learnt.
        budget: that pays for it.
    """

    def __init__(self, knowledge: Knowledge, budget: ProbingBudget) -> None:
        self._knowledge = knowledge
        self._budget = budget
        self._intervals: dict[str, float] = {}
        self.now = 0
        """Steps with decoding requests so far."""

    def pace(self, request_id: int, drafter: str) -> Pace:
        """New requests begin at the pace at which the last one was tried."""
        state = self._knowledge.requests[request_id]
        return state.pace(drafter, self._intervals.get(drafter, 2.0), self.now)

    def tried(self, request_id: int, drafter: str, success: bool) -> None:
        """A probe was verified."""
        pace = self.pace(request_id, drafter)
        pace.tried(self.now, success)
        self._intervals[drafter] = pace.interval

    def forget(self, drafter: str) -> None:
        """It is tried as often as a new one."""
        self._intervals.pop(drafter, None)

    def drafted(self, request_id: int, drafter: str) -> None:
        """It was asked because that seemed to pay; when it does no more, it is tried again soon at first."""
        self.pace(request_id, drafter).restart(self.now)

    def due(self, wishes: Sequence[Wish], price: float) -> Iterator[int]:
        """Indices of the wishes with something to try, if one more row at this price can be afforded."""
        if not self._budget.affords(price):
            return
        for index, wish in enumerate(wishes):
            if wish.most > 0 and any(self.pace(wish.request_id, name).due <= self.now for name in _names(wish)):
                yield index

    def probe(
        self,
        choice: Choice,
        wishes: Sequence[Wish],
        offers: Sequence[Offer | None],
        allotments: MutableSequence[Allotment],
        step: StepPlan,
    ) -> None:
        """Adds the most overdue probes that can be afforded."""
        overdue: list[tuple[float, int, str]] = []
        for index, (wish, offer) in enumerate(zip(wishes, offers, strict=True)):
            if wish.most < 1 or (offer is not None and offer.fixed):
                continue
            taken = allotments[index]
            names = [name for name in wish.computing if name != taken.drafter]
            if offer is not None and offer.num_tokens and not taken.keep:
                names.append(offer.drafter)
            for name in names:
                due = self.pace(wish.request_id, name).due
                if due <= self.now:
                    overdue.append((due, index, name))
        overdue.sort()
        left = 1 + len(wishes) // _REQUESTS_A_PROBE
        for _, index, name in overdue:
            wish = wishes[index]
            if left and wish.request_id not in step.whole:
                dropped = self._worth(choice, wish, offers[index], allotments[index])
                left -= self._try(choice, wish, name, dropped, index, allotments, step)

    def _worth(self, choice: Choice, wish: Wish, offer: Offer | None, taken: Allotment) -> float:
        """Seconds that are lost if what was chosen for a request is left out: what it saves beyond what it costs."""
        per_token = choice.total / choice.tokens
        if taken.keep and offer is not None:
            return per_token * sum(self._knowledge.survival(offer, size(taken.keep)))
        if taken.drafter is None:
            return 0.0
        acceptance, own = self._knowledge.acceptance(taken.drafter), self._knowledge.own(wish.request_id, taken.drafter)
        tokens = sum(acceptance.average_survival(taken.num_tokens, own))
        share = choice.shares[taken.drafter]
        saved = share.drafting if len(share.members) == 1 else 0.0
        return max(0.0, per_token * tokens - saved)

    def _try(
        self,
        choice: Choice,
        wish: Wish,
        name: str,
        dropped: float,
        index: int,
        allotments: MutableSequence[Allotment],
        step: StepPlan,
    ) -> bool:
        """Whether it could be afforded, and is done."""
        seconds = choice.seconds
        place = min(step.num_drafted, len(seconds) - 2)
        price = seconds[place + 1] - seconds[place] + dropped
        drafting = 0.0
        if name in wish.computing:
            unit = self._knowledge.target.now.seconds(1)
            drafting = unit * self._knowledge.costs(name).call(1, 1, wish.computing[name])
        if not self._budget.affords(price + drafting):
            return False
        self._budget.charge(price + drafting)
        self._replace(choice, wish, index, allotments[index], step)
        step.probes.add(wish.request_id)
        step.whole.add(wish.request_id)
        step.drafting += drafting
        step.num_drafted += 1
        if name in wish.computing:
            allotments[index] = Allotment(drafter=name, num_tokens=1)
        else:
            allotments[index] = Allotment(keep=1)
        return True

    def _replace(self, choice: Choice, wish: Wish, index: int, taken: Allotment, step: StepPlan) -> None:
        """What was planned for a request is left out, and so is the call if it was for nobody else."""
        if taken.drafter is None:
            step.num_drafted -= size(taken.keep)
            return
        share = choice.shares[taken.drafter]
        step.num_drafted -= min(share.num_tokens, wish.most_of(taken.drafter))
        left = [member for member in share.members if member != index]
        passes = self._knowledge.costs(taken.drafter).passes
        rest = passes.seconds(len(left)) / passes.seconds(len(share.members)) if left else 0.0
        waits = len(left) / len(share.members)
        step.drafting -= (1.0 - rest) * share.drafting
        step.delay -= (1.0 - waits) * share.delay
        choice.shares[taken.drafter] = replace(
            share, members=left, drafting=rest * share.drafting, delay=waits * share.delay
        )
        if not left:
            del step.calls[taken.drafter]


def _names(wish: Wish) -> list[str]:
    return [*wish.computing, *([] if wish.free is None else [wish.free])]

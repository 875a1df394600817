"""The controller that learns: who drafts how much, so that tokens come as fast as they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outpace.control.branches import selected, sibling_chance
from outpace.control.branching import Branching, row_price
from outpace.control.choosing import UNTRIED, Choice, Surroundings, best_length, choose
from outpace.control.knowledge import ControlSettings, Knowledge
from outpace.control.learning import Learning
from outpace.control.probing import ProbingBudget
from outpace.control.report import Prospect
from outpace.control.step import StepPlan
from outpace.control.trying import Trying
from outpace.decisions import Allotment, ControlReport, Offer, Selection, StepFacts, Wish

__all__ = ["AdaptiveController"]

_PLAIN_DOUBT = 0.05
"""Relative doubt of the plain step's seconds, over those of the step with drafts, from which on one is tried."""

_SAFE = 3.0
"""A gain that is so many times as large as this doubt needs no plain step to be believed."""

_GREAT_DOUBT = 0.15
"""The same, from which on one is made whatever it costs: the costs of a number of rows near this one are guesses."""

_HOPE = 0.2
"""Of the rejections in the best class of drafts, as many may be missing in a draft that nobody has seen yet."""

_BUSHY = 2
"""A tree has so many times the nodes of the longest chain that could pay, at most."""

_MOST_STOP = 0.9
"""However dear drafting is, nobody has to stop behind a token that is as likely to be kept as this."""


class AdaptiveController:
    """Implements `outpace.protocols.Controller`; see docs/control.md.

    Args:
        settings: first guesses; None for the usual ones.
        knowledge: to go on with, such as what `memory.recall` gives.
    """

    def __init__(self, settings: ControlSettings | None = None, knowledge: Knowledge | None = None) -> None:
        self.knowledge = knowledge if knowledge is not None else Knowledge(settings or ControlSettings())
        self._budget = ProbingBudget()
        self._trying = Trying(self.knowledge, self._budget)
        self._branching = Branching(self.knowledge)
        self._learning = Learning(self.knowledge, self._budget, self._trying)
        self._step = StepPlan()

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        """Most draft tokens that can pay, by the best chance there is hope for."""
        around = _around(wishes, other_rows, other_decoding)
        if self._learning.resting.rests(around.decoding):
            if not any(wish.computing for wish in wishes):
                return [0] * len(wishes)
            wishes = [replace(wish, free=None) for wish in wishes]  # who computes may be asked all the same
        table = self.knowledge.step_seconds(
            around.rows, around.prompt_rows, max((wish.most for wish in wishes), default=0)
        )
        prospects: dict[str, Prospect | None] = {}
        rounds = self._rounds(wishes, around)
        limits = [self._ceiling(wish, table, around, rounds, prospects) for wish in wishes]
        for name, prospect in prospects.items():
            self._learning.note(name, prospect)
        if not around.prompt_rows:
            for index in self._trying.due(wishes, table[1] - table[0] if len(table) > 1 else 0.0):
                limits[index] = max(limits[index], 1)
        return limits

    def _rounds(self, wishes: Sequence[Wish], around: Surroundings) -> dict[str, float]:
        """Seconds of a token of every computing drafter, for one request if it drafts for all; none beside prompts."""
        names = set() if around.prompt_rows else {name for wish in wishes for name in wish.computing}
        unit = self.knowledge.target.now.seconds(1) / around.decoding
        return {name: unit * self.knowledge.costs(name).passes.seconds(around.decoding) for name in names}

    def _ceiling(
        self,
        wish: Wish,
        table: Sequence[float],
        around: Surroundings,
        rounds: Mapping[str, float],
        prospects: dict[str, Prospect | None],
    ) -> int:
        """Also notes why a drafter has nothing to hope for; None where it has, be it with one request."""
        knowledge, margin = self.knowledge, self.knowledge.settings.margin
        best = 0
        for name in wish.computing if rounds else ():
            chance = self._hope(wish, name) if knowledge.is_known(name) else UNTRIED
            most = wish.most_of(name)
            length, prospect = best_length(chance, table, most, around.decoding, margin, rounds[name])
            prospects[name] = prospects.get(name, prospect) and prospect
            best = max(best, most if length else 0)
        if wish.free is not None and best < wish.most:
            length, prospect = best_length(self._hope(wish, wish.free), table, wish.most, around.decoding, margin)
            prospects[wish.free] = prospects.get(wish.free, prospect) and prospect
            if wish.free in wish.widths:
                length = min(wish.most, _BUSHY * length)
            best = max(best, length)
        return best

    def _hope(self, wish: Wish, name: str) -> float:
        chance = self.knowledge.acceptance(name).best_chance(self.knowledge.own(wish.request_id, name))
        return 1.0 - (1.0 - _HOPE) * (1.0 - chance)

    def width(self, wish: Wish, decoding: int) -> int:
        """As wide as it can be where branches pay, or nobody knows: lookups branch for nothing."""
        assert wish.free is not None
        if self._branching.pays(wish.request_id, wish.free, decoding) is False:
            return 1
        self._branching.asked(wish.request_id, wish.free, wish.most)
        return wish.widths[wish.free]

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        """What pays most with what is known, a probe now and then."""
        around = _around(wishes, other_rows, other_decoding)
        step = self._step = StepPlan()
        step.looked_up = next((wish.free for wish in wishes if wish.free is not None), None)
        margin = self.knowledge.settings.margin
        choice = choose(self.knowledge, around, wishes, offers, margin)
        if choice.values is not None:
            step.values = {wish.request_id: value for wish, value in zip(wishes, choice.values, strict=True)}
        for name, prospect in choice.prospects.items():
            self._learning.note(name, prospect)
        self._look_at_branches(choice, offers, around)
        if not any(offer is not None and offer.fixed for offer in offers) and self._plain_is_due(choice, around):
            return [Allotment()] * len(wishes)
        allotments = self._allotments(choice, wishes, around, step)
        if not around.prompt_rows:
            self._trying.probe(choice, wishes, offers, allotments, step)
        step.foresee(choice, wishes, allotments)
        return allotments

    def _look_at_branches(self, choice: Choice, offers: Sequence[Offer | None], around: Surroundings) -> None:
        """What branches of the drafts at hand bring."""
        row = row_price(choice.seconds, choice.num_drafted, choice.tokens, choice.total)
        for index, found in choice.ranked.items():
            offer = offers[index]
            assert offer is not None
            self._branching.look_at(offer, found, around.decoding, row)

    def _plain_is_due(self, choice: Choice, around: Surroundings) -> bool:
        """Whether to leave all drafts out once, to see what they add to a step: it is a guess, or may have changed."""
        if not choice.num_drafted or around.prompt_rows:
            return False
        doubt = self.knowledge.target.now.doubt(around.rows, around.rows + choice.num_drafted)
        plain = around.decoding / choice.seconds[0]
        gain = choice.tokens / choice.total / plain - 1.0
        if doubt < min(_GREAT_DOUBT, max(_PLAIN_DOUBT, gain / _SAFE)):
            return False
        price = choice.seconds[0] - around.decoding * choice.total / choice.tokens
        if doubt < _GREAT_DOUBT and not self._budget.affords(price):
            return False
        self._budget.charge(price)
        return True

    def _allotments(
        self, choice: Choice, wishes: Sequence[Wish], around: Surroundings, step: StepPlan
    ) -> list[Allotment]:
        orders = {index: found.order for index, found in choice.ranked.items()}
        allotments = [
            Allotment(keep=selected(orders.get(index), count)) for index, count in enumerate(choice.plan.counts)
        ]
        per_token = choice.total / choice.tokens
        last = min(choice.num_drafted, len(choice.seconds) - 2)
        slope = choice.seconds[last + 1] - choice.seconds[last] if last >= 0 else 0.0
        for name, share in choice.shares.items():
            costs = self.knowledge.costs(name)
            many = len(share.members)
            one_round = self.knowledge.target.now.seconds(1) * costs.passes.seconds(many) / many
            acceptance = self.knowledge.acceptance(name)
            step.calls[name] = one_round
            known = self.knowledge.is_known(name)
            for index in share.members:
                wish = wishes[index]
                most = wish.most_of(name)
                asked = most if known and costs.stops else min(share.num_tokens, most)
                width = self._width(wish, name, around, one_round * share.num_tokens) if known else 1
                if width > 1:
                    asked = most
                    self._branching.asked(wish.request_id, name, asked)
                # The token behind this one is computed in any case, and verified only if that turns out to be worth it.
                chance = acceptance.average_chance(1, self.knowledge.own(wish.request_id, name))
                stop_below = min(_MOST_STOP, (slope + one_round / chance) / per_token)
                allotments[index] = Allotment(0, name, asked, width, stop_below)
                if not known:
                    step.whole.add(wish.request_id)
            step.drafting += share.drafting
            step.delay += share.delay
        step.num_drafted = choice.num_drafted
        return allotments

    def _width(self, wish: Wish, drafter: str, around: Surroundings, drafting: float) -> int:
        """How wide a computing drafter is asked to draft, be it to see what that brings, in `drafting` seconds."""
        most = wish.widths.get(drafter, 1)
        if most == 1:
            return 1
        pays = self._branching.pays(wish.request_id, drafter, around.decoding)
        if pays is None:
            price = (self.knowledge.costs(drafter).wide - 1.0) * drafting
            if not self._budget.affords(max(0.0, price)):
                return 1
            self._budget.charge(max(0.0, price))
        return 1 if pays is False else most

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[Selection]:
        """Cuts what is not worth its row, now that what was computed has been paid for."""
        around = _around(offers, other_rows, other_decoding)
        return self._step.keep(self.knowledge, self._branching, around, offers)

    def calibrated(
        self, request_id: int, drafter: str, position: int, confidence: float, before: Sequence[float] = ()
    ) -> float:
        """From what became of tokens of which this drafter said the like."""
        acceptance, own = self.knowledge.acceptance(drafter), self.knowledge.own(request_id, drafter)
        if before:
            return sibling_chance(acceptance, own, position, confidence, before)
        return acceptance.chance(position, confidence, own)

    def observe(self, facts: StepFacts) -> None:
        """Learns from a step: costs, acceptances, and whether drafting keeps what it promised."""
        self._learning.observe(facts, self._step)
        self._step = StepPlan()
        self._branching.end_step(self._trying.now)

    def abandon(self) -> None:
        """Forgets the step under way."""
        self._step = StepPlan()
        self._branching.end_step(self._trying.now)

    def release(self, request_id: int) -> None:
        """Forgets a request."""
        self.knowledge.requests.release(request_id)

    def restart_report(self) -> None:
        """Counts begin anew."""
        self._learning.restart_report()

    def forget(self, drafter: str, relative_cost: float | None = None) -> None:
        """Begins anew with a drafter. What was counted of the old one stays in the reports."""
        self.knowledge.forget(drafter, relative_cost)
        self._trying.forget(drafter)
        self._learning.note(drafter, None)

    def report(self) -> ControlReport:
        """Counts since the start."""
        return self._learning.report()


def _around(wishes: Sequence[Wish] | Sequence[Offer], other_rows: int, other_decoding: int) -> Surroundings:
    decoding = len(wishes) + other_decoding
    return Surroundings(max(1, decoding), max(1, len(wishes) + other_rows), other_rows - other_decoding)

"""The draft station: who drafts how much for whom in a step. The controller decides; this asks it and does so.

    free drafters are asked -> the controller allots -> computing drafters are asked -> the controller says what is kept

Nothing that is decided here can change a token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from outpace.decisions import GRAMMAR, Allotment, DraftCall, Offer, Selection, StepFacts, VerifiedOffer, Wish
from outpace.engine.drafting import NO_DRAFT, Drafting, ask_for, shortened
from outpace.engine.pack import Block
from outpace.engine.request import Request
from outpace.engine.scheduler import Turn
from outpace.protocols import Controller
from outpace.types import Ask, Draft, Verdict
from outpace.verify.clean import subtree

__all__ = ["Steering"]


class Steering:
    """Asks the controller what is drafted, and tells it what came of it.

    Args:
        drafting: the loaded drafters.
        controller: decides.
        disable_by_batch_size: per drafter name, most running requests beside which it is asked.
        threads: how many compute a step now.
    """

    def __init__(
        self,
        drafting: Drafting,
        controller: Controller,
        disable_by_batch_size: Mapping[str, int],
        threads: Callable[[], int],
    ) -> None:
        self.controller = controller
        self._drafting = drafting
        self._disable_by_batch_size = dict(disable_by_batch_size)
        self._threads = threads
        self._offers: dict[int, Offer] = {}
        self._whole: dict[int, tuple[Offer, Draft]] = {}  # drafts with branches, before they were cut
        self._calls: list[DraftCall] = []
        self._decoding: list[int] = []
        self._verified: list[VerifiedOffer] = []
        self._lookups = 0.0  # seconds

    # For the scheduler, before rows are handed out.

    def most(self, request: Request, num_tokens: int, num_running: int) -> int:
        """Most draft tokens behind `num_tokens` committed ones, whether they pay or not."""
        wish = self._wish(request, num_tokens, num_running)
        return 0 if wish is None else wish.most

    def ceilings(self, requests: Sequence[Request], num_running: int, prompt_rows: int) -> dict[Request, int]:
        """Most draft tokens that may pay beside so many rows of prompts, of requests with one token to compute."""
        ceilings = dict.fromkeys(requests, 0)
        wishes = {r: wish for r in requests if (wish := self._wish(r, 1, num_running)) is not None}
        if wishes:
            others = len(requests) - len(wishes)
            found = self.controller.ceilings(list(wishes.values()), others + prompt_rows, others)
            ceilings.update(zip(wishes, found, strict=True))
        return ceilings

    def _wish(self, request: Request, num_tokens: int, num_running: int) -> Wish | None:
        """None if nobody may draft: before the end of the text, in too large a batch, or with one token to come.

        A step brings one token more than it drafts, so the last token allowed is never drafted. Who computes is not
        asked before there is a first token, for which somebody waits.
        """
        plan = request.plan
        remaining = request.max_total_tokens - len(request.token_ids)
        if not plan.drafters or num_tokens < request.num_uncomputed or remaining < 2:
            return None
        allowed = [name for name in plan.drafters if num_running <= self._disable_by_batch_size.get(name, num_running)]
        if num_tokens > 1 or not request.num_output_tokens:
            allowed = [name for name in allowed if name == plan.free]
        free = plan.free if plan.free in allowed else None
        behind: dict[str, int] = {}
        for name in allowed:
            rows = None if name == free else self._drafting.rows_behind(name, request)
            if rows is not None:
                behind[name] = rows
        allowed = [*behind] if free is None else [free, *behind]
        if not allowed:
            return None
        most = min(max(plan.most[name] for name in allowed), remaining - 1)
        widths = plan.widths if len(allowed) == len(plan.drafters) else _only(plan.widths, allowed)
        limits = {name: plan.most[name] for name in allowed if plan.most[name] < most}
        return Wish(request.id, most, free, behind, remaining, widths, limits)

    # The station.

    def propose(self, turns: Sequence[Turn], free_rows: int, num_running: int) -> list[Draft]:
        """One draft per turn, empty where none is wanted or offered.

        Args:
            turns: of the step.
            free_rows: rows of the step that nobody uses: a drafter that is behind may compute as many.
            num_running: requests that run.
        """
        began = time.perf_counter()
        self._offers, self._whole, self._calls, self._verified, self._lookups = {}, {}, [], [], 0.0
        drafts = self._proposed(turns, free_rows, num_running)
        if any(turn.num_draft_tokens for turn in turns):
            self._lookups = time.perf_counter() - began - sum(call.seconds for call in self._calls)
        return drafts

    def _proposed(self, turns: Sequence[Turn], free_rows: int, num_running: int) -> list[Draft]:
        drafts = [NO_DRAFT] * len(turns)
        wishes: dict[int, Wish] = {}
        for index, turn in enumerate(turns):
            if turn.num_draft_tokens:
                wish = self._wish(turn.request, turn.num_tokens, num_running)
                if wish is not None:
                    wishes[index] = replace(wish, most=min(wish.most, turn.num_draft_tokens))
        if not wishes:
            return drafts
        other_rows = sum(turn.num_tokens for turn in turns) - len(wishes)
        other_decoding = sum(turn.reaches_end for turn in turns) - len(wishes)
        self._look_up(turns, wishes, drafts, len(wishes) + other_decoding)
        offers = [self._offers.get(turns[index].request.id) for index in wishes]
        allotments = self.controller.allot(list(wishes.values()), offers, other_rows, other_decoding)
        asked: dict[str, dict[int, Ask]] = defaultdict(dict)
        for index, allotment in zip(wishes, allotments, strict=True):
            request = turns[index].request
            drafts[index] = self._cut(drafts[index], request, allotment.keep)
            if allotment.drafter is not None and allotment.num_tokens > 0:
                asked[allotment.drafter][index] = self._ask(turns[index], allotment.drafter, allotment)
        for name, asks in asked.items():
            self._compute(name, turns, asks, free_rows // len(asked), drafts)
        if asked:
            self._keep(turns, drafts)
        return drafts

    def _look_up(self, turns: Sequence[Turn], wishes: Mapping[int, Wish], drafts: list[Draft], decoding: int) -> None:
        """Asks whoever answers at once: grammars that prescribe text, and free drafters."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, wish in wishes.items():
            drafts[index] = self._drafting.forced(turns[index])
            if drafts[index]:
                self._offer(turns[index].request, GRAMMAR, drafts[index])
            elif wish.free is not None:
                groups[wish.free].append(index)
        for name, indices in groups.items():
            asked = [turns[index] for index in indices]
            asks = [self._lookup_ask(turns[index], wishes[index], name, decoding) for index in indices]
            for index, draft in zip(indices, self._drafting.propose(name, asks, asked, 0), strict=True):
                drafts[index] = draft
                self._offer(turns[index].request, name, draft)

    def _lookup_ask(self, turn: Turn, wish: Wish, drafter: str, decoding: int) -> Ask:
        most = min(turn.num_draft_tokens, turn.request.plan.most[drafter])
        width = self.controller.width(wish, decoding) if drafter in wish.widths else 1
        return ask_for(turn.request, most, width=width)

    def _ask(self, turn: Turn, drafter: str, allotment: Allotment) -> Ask:
        most = min(allotment.num_tokens, turn.num_draft_tokens, turn.request.plan.most[drafter])
        chance = partial(self.controller.calibrated, turn.request.id, drafter)
        return ask_for(turn.request, most, width=allotment.width, stop_below=allotment.stop_below, chance=chance)

    def _compute(
        self, name: str, turns: Sequence[Turn], asks: Mapping[int, Ask], free_rows: int, drafts: list[Draft]
    ) -> None:
        """Asks a computing drafter. One that is behind may spend the rows granted to its drafts, and unused ones."""
        behind = self._rows_behind(name, turns, asks)
        budget = free_rows + sum(ask.num_draft_tokens for ask in asks.values())
        asked = [turns[index] for index in asks]
        began = time.perf_counter()
        proposed = self._drafting.propose(name, list(asks.values()), asked, budget)
        seconds = time.perf_counter() - began
        left = self._rows_behind(name, turns, asks)
        for index, draft in zip(asks, proposed, strict=True):
            drafts[index] = draft
            self._offer(turns[index].request, name, draft)
        rounds = max((draft.depth for draft in proposed), default=0)
        num_wide = sum(ask.width is not None and ask.width > 1 for ask in asks.values())
        self._calls.append(DraftCall(name, len(asks), rounds, max(0, behind - left), seconds, num_wide))

    def _rows_behind(self, name: str, turns: Sequence[Turn], asks: Mapping[int, Ask]) -> int:
        """What is missing of all who are asked for; nothing where the drafter has just come to its end."""
        return sum(self._drafting.rows_behind(name, turns[index].request) or 0 for index in asks)

    def _keep(self, turns: Sequence[Turn], drafts: list[Draft]) -> None:
        """Lets the controller look at all drafts together."""
        there = [index for index, draft in enumerate(drafts) if draft]
        offers = [self._offers[turns[index].request.id] for index in there]
        other_rows = sum(turn.num_tokens for turn in turns) - len(there)
        other_decoding = sum(turn.reaches_end for turn in turns) - len(there)
        for index, kept in zip(there, self.controller.keep(offers, other_rows, other_decoding), strict=True):
            drafts[index] = self._cut(drafts[index], turns[index].request, kept)

    def _offer(self, request: Request, drafter: str, draft: Draft) -> None:
        if draft:
            fixed = request.plan.verification != "coupled" and draft.probabilities is not None
            parents = None if draft.is_chain else draft.parents
            offer = Offer(request.id, drafter, len(draft), draft.confidence, fixed, parents)
            self._offers[request.id] = offer
            if parents is not None and request.id not in self._whole:
                self._whole[request.id] = offer, draft

    def _cut(self, draft: Draft, request: Request, kept: Selection) -> Draft:
        """These tokens of a draft, and of its offer. No token is without its parent, so what is left is a draft too."""
        offer = self._offers.get(request.id)
        most = kept if isinstance(kept, int) else len(kept)
        if offer is None or len(draft) <= most:
            return draft
        if not most:
            del self._offers[request.id]
            self._whole.pop(request.id, None)
            return NO_DRAFT
        draft = shortened(draft, kept) if isinstance(kept, int) else subtree(draft, kept)
        self._offer(request, offer.drafter, draft)
        return draft

    # After the step.

    def drafter_of(self, request: Request) -> str | None:
        """Who made the draft of this step."""
        offer = self._offers.get(request.id)
        return None if offer is None else offer.drafter

    def verified(self, blocks: Sequence[Block], verdicts: Sequence[Verdict | None]) -> None:
        """What verification kept, be it that the text ended before."""
        self._decoding = [block.turn.request.id for block in blocks if block.num_choices]
        for block, verdict in zip(blocks, verdicts, strict=True):
            if block.draft and verdict is not None:
                self._verified.append(self._outcome(self._offers[block.turn.request.id], block.draft, verdict))

    def _outcome(self, offer: Offer, draft: Draft, verdict: Verdict) -> VerifiedOffer:
        if offer.request_id not in self._whole:
            return VerifiedOffer(offer, len(verdict.accepted))
        whole, uncut = self._whole[offer.request_id]
        text = [*(draft.ids[node] for node in verdict.accepted), verdict.bonus]
        return VerifiedOffer(offer, len(verdict.accepted), whole, _along(uncut, text))

    def observe(self, blocks: Sequence[Block], seconds: float) -> None:
        """Tells the controller what a step did, and took, and who has gone."""
        if blocks:
            self.controller.observe(
                StepFacts(
                    threads=self._threads(),
                    prefill_rows=sum(block.turn.num_tokens for block in blocks) - len(self._decoding),
                    decoding=self._decoding,
                    drafts=self._verified,
                    calls=self._calls,
                    seconds=seconds - self._lookups - sum(call.seconds for call in self._calls),
                    lookups=self._lookups,
                )
            )
        for block in blocks:
            if block.turn.request.finish_reason:
                self.release(block.turn.request)

    def abandon(self) -> None:
        """The step under way failed, and is not observed."""
        self._offers, self._whole, self._calls, self._verified, self._lookups = {}, {}, [], [], 0.0
        self.controller.abandon()

    def release(self, request: Request) -> None:
        """The request has ended."""
        self.controller.release(request.id)


def _only(widths: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    return {name: width for name, width in widths.items() if name in names}


def _along(draft: Draft, text: Sequence[int]) -> tuple[int, ...]:
    """The nodes of a draft that say what came, as far as there are any. Siblings may say the same."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for token in text:
        found = {
            node: (*paths[parent], node)
            for node, parent in enumerate(draft.parents)
            if parent in paths and draft.ids[node] == token
        }
        if not found:
            break
        paths = found
    return next(iter(paths.values()))

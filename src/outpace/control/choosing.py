"""What would pay in this step: plans made of what is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.control.allocation import Plan, allocate
from outpace.control.branches import Ranked
from outpace.control.computed import Candidate, Share, choose_computed
from outpace.control.fairness import token_values
from outpace.control.floor import Limits
from outpace.control.knowledge import Knowledge
from outpace.control.prospects import of_lookups
from outpace.control.report import Prospect
from outpace.control.widths import LEAST_GAIN
from outpace.decisions import Offer, Wish

__all__ = ["Choice", "Surroundings", "best_length", "choose"]

FEW_ROWS = 8
"""A drafter that is no more rows behind is asked as usual; catching up with more is an investment."""

UNTRIED = 0.9
"""Chance of a token of a computing drafter that is new: somebody wants it, so it is tried if it could pay at all."""


@dataclass(slots=True)
class Surroundings:
    """What a step computes in any case.

    Args:
        decoding: requests that get a token each.
        rows: of the target, prompts included.
        prompt_rows: of these.
    """

    decoding: int
    rows: int
    prompt_rows: int


@dataclass(slots=True)
class Choice:
    """What is verified and who is asked.

    Args:
        plan: of the drafts at hand, one count a wish; those of members of a share are dropped.
        shares: by computing drafter, for whom it drafts.
        seconds: [1 + tokens] of the step by draft tokens.
        tokens: expected of the step.
        total: seconds expected of the step, drafting included.
        num_drafted: draft tokens in it.
        survivals: of every wish, falling chances of the tokens of the draft at hand.
        values: what a token of every wish counts; None where it is 1 for all.
        limits: how long the step may take; None: however long.
        allowed: seconds, for every wish with what is drafted for it; empty without limits.
        ranked: of the wishes with such a draft, by index, whose chances these are.
        prospects: by drafter that is at hand and was not chosen at all.
    """

    plan: Plan
    seconds: list[float]
    tokens: float
    total: float
    num_drafted: int
    survivals: list[list[float]]
    values: list[float] | None
    limits: Limits | None
    allowed: list[float]
    ranked: dict[int, Ranked]
    shares: dict[str, Share] = field(default_factory=dict)
    prospects: dict[str, Prospect] = field(default_factory=dict)

    @property
    def drafting(self) -> float:
        """Seconds of calls."""
        return sum(share.drafting for share in self.shares.values())


def best_length(
    chance: float, seconds: Sequence[float], most: int, decoding: int, margin: float, each: float = 0.0
) -> tuple[int, Prospect | None]:
    """The draft length for one request that pays most if every token has this chance; else 0, and the best one's price.

    Args:
        chance: of a token, if those before it are kept.
        seconds: [1 + most, or more] of the step by draft tokens.
        most: tokens of the draft.
        decoding: requests that get a token each.
        margin: by how much drafts must be better, relative.
        each: seconds that drafting a token takes.
    """
    plain = decoding / seconds[0]
    tokens, alive = float(decoding), 1.0
    best, best_tokens, rate = 0, tokens, 0.0
    behind = chance / (1.0 - chance) if chance < 1.0 else math.inf  # of all tokens behind one that is kept, in sum
    for length in range(1, min(most + 1, len(seconds))):
        alive *= chance
        tokens += alive
        total = seconds[length] + length * each
        if tokens > rate * total:
            best, best_tokens, rate = length, tokens, tokens / total
        elif tokens + alive * behind <= rate * total:
            break  # not with all that may follow
    if rate > plain * (1.0 + margin):
        return best, None
    return 0, Prospect(best, best_tokens - decoding, seconds[best] - seconds[0], best * each, rate / plain)


def choose(
    knowledge: Knowledge,
    around: Surroundings,
    wishes: Sequence[Wish],
    offers: Sequence[Offer | None],
    margin: float,
) -> Choice:
    """Drafts at hand first, then every computing drafter that beats them, the best one first.

    No computing drafter is asked beside prompt rows: somebody waits for a first token.
    """
    found = {index: knowledge.ranked(offer) for index, offer in enumerate(offers) if offer is not None}
    survivals = [  # cut here and not before: what branches bring is told from the whole draft
        found[index].survival[: _limit(knowledge, wishes[index], offer)] if offer is not None else []
        for index, offer in enumerate(offers)
    ]
    fixed = [len(s) if offer is not None and offer.fixed else 0 for s, offer in zip(survivals, offers, strict=True)]
    most = sum(
        max(wish.most, len(survival)) if wish.computing else max(1, len(survival))
        for wish, survival in zip(wishes, survivals, strict=True)
    )
    seconds = knowledge.step_seconds(around.rows, around.prompt_rows, most)
    values = token_values(knowledge.requests, [wish.request_id for wish in wishes], around.decoding)
    limits = knowledge.limits([wish.request_id for wish in wishes], around.decoding, seconds[0])
    plan = allocate(
        survivals, seconds, decoding=around.decoding, at_least=fixed, margin=margin, values=values, limits=limits
    )
    num_drafted = sum(plan.counts)
    choice = Choice(plan, seconds, plan.tokens, plan.seconds, num_drafted, survivals, values, limits, [], found)
    choice.prospects.update(of_lookups(plan, offers, survivals))
    free = [] if around.prompt_rows else [i for i, wish in enumerate(wishes) if wish.computing and not fixed[i]]
    if free:
        if limits is not None:
            choice.allowed = limits.with_drafts(survivals, plan.counts)
        _add_computed(knowledge, around, choice, wishes, free, margin)
    return choice


def _limit(knowledge: Knowledge, wish: Wish, offer: Offer) -> int:
    """Most tokens of a draft that may be verified."""
    return offer.num_tokens if offer.fixed else min(wish.most, knowledge.longest(offer.drafter))


def _add_computed(
    knowledge: Knowledge,
    around: Surroundings,
    choice: Choice,
    wishes: Sequence[Wish],
    open_to: list[int],
    margin: float,
) -> None:
    """Asks computing drafters where they bring more than what was chosen, the best one first."""
    names = {name for index in open_to for name in wishes[index].computing}
    while names:
        shares = {name: _share(knowledge, around, choice, name, wishes, open_to) for name in sorted(names)}
        best = max(((share.rate, name) for name, (share, _) in shares.items() if share is not None), default=None)
        enough = choice.tokens / choice.total * (1.0 + margin)
        share = None if best is None else shares[best[1]][0]
        if best is None or best[0] <= enough:
            for name, (promise, held) in shares.items():
                _note_unasked(knowledge, choice, name, wishes, promise, held, margin)
            if best is None:
                return
            share = _share(knowledge, around, choice, best[1], wishes, open_to, hopeful=True)[0]
            if share is None or share.rate <= enough:
                return
        assert share is not None
        name = best[1]
        share = _new_drafter(knowledge, around, choice, share, name, wishes)
        names.remove(name)
        choice.shares[name] = share
        choice.prospects.pop(name, None)
        choice.tokens, choice.total = share.tokens, share.seconds
        for index, gain in zip(share.members, share.gains, strict=True):
            if choice.limits is not None:
                choice.allowed[index] += choice.limits.token * gain / (choice.values[index] if choice.values else 1.0)
            choice.num_drafted += min(share.num_tokens, wishes[index].most_of(name)) - choice.plan.counts[index]
            open_to.remove(index)


def _note_unasked(
    knowledge: Knowledge,
    choice: Choice,
    name: str,
    wishes: Sequence[Wish],
    promise: Share | None,
    held: Share | None,
    margin: float,
) -> None:
    """Notes what a drafter promised: what would have paid if all could bear it, else the best that they can."""
    if held is not None:
        prospect = _prospect(knowledge, choice, held, name, wishes)
        prospect.held = prospect.ratio > 1.0 + margin
        if prospect.held or promise is None:
            choice.prospects[name] = prospect
            return
    if promise is not None:
        choice.prospects[name] = _prospect(knowledge, choice, promise, name, wishes)


def _prospect(knowledge: Knowledge, choice: Choice, share: Share, name: str, wishes: Sequence[Wish]) -> Prospect:
    """What a computing drafter would have brought: tokens, whatever they are worth beside those of other requests."""
    drafts = [_survival(knowledge, name, wishes[index])[: share.num_tokens] for index in share.members]
    verifying = max(0.0, share.seconds - share.drafting - choice.total)
    tokens, kept = sum(map(len, drafts)), sum(map(sum, drafts))
    return Prospect(tokens, kept, verifying, share.drafting, share.rate * choice.total / choice.tokens)


def _new_drafter(
    knowledge: Knowledge, around: Surroundings, choice: Choice, share: Share, name: str, wishes: Sequence[Wish]
) -> Share:
    """What is promised for a drafter nobody knows is hope: its drafts begin short, and no more is expected of them.

    One request will tell, where the least has to be caught up with, and one token if nobody has timed it.
    """
    length, members = knowledge.longest(name), share.members
    if not knowledge.is_known(name):
        members = [min(members, key=lambda index: wishes[index].computing[name])]
        length = length if knowledge.costs(name).num_calls else 1
    if length >= share.num_tokens and len(members) == len(share.members):
        return share
    return _share(knowledge, around, choice, name, wishes, members, most=length, bounded=False)[0] or share


def _share(
    knowledge: Knowledge,
    around: Surroundings,
    choice: Choice,
    name: str,
    wishes: Sequence[Wish],
    open_to: Sequence[int],
    *,
    hopeful: bool = False,
    most: int | None = None,
    bounded: bool = True,
) -> tuple[Share | None, Share | None]:
    """The best that a computing drafter can do beside what was chosen, and a better one that somebody cannot bear.

    Args:
        knowledge: what is learnt.
        around: what the step computes in any case.
        choice: so far.
        name: of the drafter.
        wishes: all.
        open_to: indices of the wishes it may draft for.
        hopeful: one token each, at a chance a little above the likely one, and only where it is up to date: giving up
            has a price too, since it has to catch up before it can be tried again.
        most: tokens a request; None: as many as are wished for.
        bounded: whether everybody has to bear it.
    """
    candidates = []
    acceptance, costs, unit = knowledge.acceptance(name), knowledge.costs(name), knowledge.target.now.seconds(1)
    row, values, limits = costs.row * unit, choice.values, choice.limits if bounded else None
    for index in open_to:
        wish = wishes[index]
        if name in wish.computing and wish.most > 0 and not (hopeful and wish.computing[name] > FEW_ROWS):
            if hopeful:
                chance = acceptance.hopeful_chance(knowledge.own(wish.request_id, name))
                survival = [knowledge.speaks(wish.request_id, name) * chance]
            else:
                survival = _survival(knowledge, name, wish)[:most]
            count = choice.plan.counts[index]
            seconds = row * wish.computing[name]
            price = (
                seconds if wish.computing[name] <= FEW_ROWS else seconds * _due(knowledge, wish, 1.0 + sum(survival))
            )
            value = 1.0 if values is None else values[index]
            instead = (count, value * sum(choice.survivals[index][:count])) if count else (0, 0.0)
            branches = knowledge.branch_gain(wish.request_id, name, around.decoding) if name in wish.widths else None
            gain = branches if branches is not None and branches > LEAST_GAIN and not hopeful else 0.0
            if values is not None:
                survival = [value * chance for chance in survival]
            candidate = Candidate(index, survival, instead, price, seconds - price, value * gain)
            if limits is not None:
                candidate.allowed, candidate.token = choice.allowed[index], limits.token / value
            candidates.append(candidate)
    if not candidates:
        return None, None
    rounds = [unit * seconds for seconds in costs.passes.table(1, len(candidates))]
    return choose_computed(
        candidates,
        rounds,
        choice.seconds,
        tokens=choice.tokens,
        num_drafted=choice.num_drafted,
        drafting=choice.drafting,
        longest=_longest(choice, candidates) if bounded else math.inf,
    )


def _longest(choice: Choice, candidates: Sequence[Candidate]) -> float:
    """Seconds that the others can bear."""
    if choice.limits is None:
        return math.inf
    own = {candidate.index for candidate in candidates}
    return min([choice.limits.others] + [allowed for at, allowed in enumerate(choice.allowed) if at not in own])


def _survival(knowledge: Knowledge, name: str, wish: Wish) -> list[float]:
    """Chances of the tokens that a computing drafter may draft, before it does."""
    most = wish.most_of(name)
    if not knowledge.is_known(name):
        return [UNTRIED**position for position in range(1, 1 + most)]
    survival = knowledge.acceptance(name).average_survival(most, knowledge.own(wish.request_id, name))
    speaks = knowledge.speaks(wish.request_id, name)
    return survival if speaks == 1.0 else [speaks * chance for chance in survival]


def _due(knowledge: Knowledge, wish: Wish, tokens: float) -> float:
    """The share of the price of catching up that a step which brings this many tokens has to bear, 0 to 1.

    A few rows are a part of drafting. Many are an investment, spread over the tokens that may profit: as many as may
    come, but no more than a fixed number and those that have come, since nobody knows where a text ends.
    """
    horizon = min(wish.remaining, knowledge.settings.horizon + knowledge.requests[wish.request_id].num_tokens)
    return min(1.0, tokens / max(1.0, horizon))

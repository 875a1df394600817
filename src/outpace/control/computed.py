"""Whom a computing drafter drafts for, and how far: a pure function of chances and seconds, as `allocation` is.

The most tokens per second are looked for among the steps that every request can bear (`floor`), and, to say what that
limit costs, among all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Candidate", "Share", "choose_computed"]


@dataclass(slots=True)
class Candidate:
    """A request that a computing drafter could draft for.

    Args:
        index: of the request.
        survival: chances of the tokens it would draft, up to the most it may, times what a token of it counts.
        instead: (tokens, chances in sum) of the draft at hand that would be dropped for it.
        price: seconds of catching up, as far as this step has to bear them.
        delay: the other seconds of catching up: an investment of this request, but those beside it wait for it now.
        branches: tokens that branches of the draft bring, what they cost deducted.
        allowed: seconds that it can bear of the step with what is drafted for it now.
        token: seconds more for every token, as `survival` counts them, that it gains.
    """

    index: int
    survival: Sequence[float]
    instead: tuple[int, float] = (0, 0.0)
    price: float = 0.0
    delay: float = 0.0
    branches: float = 0.0
    allowed: float = math.inf
    token: float = 0.0


@dataclass(slots=True)
class Share:
    """Who is drafted for by a computing drafter, and how far.

    Args:
        members: indices of the requests.
        num_tokens: that each is asked for, at most.
        rate: expected tokens per second.
        tokens: expected of the step.
        seconds: expected of the step, drafting included.
        drafting: of these, seconds of the call.
        delay: seconds of catching up that are not in these; see `Candidate`.
        gains: tokens that each of the members gains, as `Candidate.survival` counts them.
    """

    members: list[int]
    num_tokens: int
    rate: float
    tokens: float
    seconds: float
    drafting: float
    delay: float = 0.0
    gains: Sequence[float] = ()


def choose_computed(
    candidates: Sequence[Candidate],
    round_seconds: Sequence[float],
    step_seconds: Sequence[float],
    *,
    tokens: float,
    num_drafted: int = 0,
    drafting: float = 0.0,
    longest: float = math.inf,
) -> tuple[Share | None, Share | None]:
    """The best rate with a computing drafter for one request at least.

    For every length, requests are taken in order of what the drafter brings them over what they have; every number of
    requests is looked at, as one call drafts for all of them at the price of little more than one.

    Args:
        candidates: who could be drafted for.
        round_seconds: [candidates] of one token for each of 1, 2, ... requests.
        step_seconds: of the step with 0, 1, 2, ... draft tokens, as many as there could be.
        tokens: expected of the step without this drafter.
        num_drafted: draft tokens of the step without this drafter.
        drafting: seconds of calls that are made anyway.
        longest: seconds that those who are no candidates can bear of the step.

    Returns:
        The best share that everybody can bear, None if there is none; and a better one that somebody cannot.
    """
    scan = _for_one if len(candidates) == 1 else _for_several
    found = scan(candidates, round_seconds, step_seconds, tokens, num_drafted, drafting, math.inf, bounded=False)
    if found is None:
        return None, None
    top = _share_of(candidates, step_seconds, drafting, found)
    bounded = longest < math.inf or min([candidate.allowed for candidate in candidates]) < math.inf
    if not bounded or _bear(candidates, found[1], top, longest):
        return top, None
    least = step_seconds[max(0, 1 + num_drafted - sum([candidate.instead[0] for candidate in candidates]))]
    if not _could_bear(candidates, least + round_seconds[0] + drafting, longest):
        return None, top
    found = scan(candidates, round_seconds, step_seconds, tokens, num_drafted, drafting, longest, bounded=True)
    best = None if found is None else _share_of(candidates, step_seconds, drafting, found)
    return best, top if best is None or top.rate > best.rate else None


def _bear(candidates: Sequence[Candidate], chosen: Sequence[int], share: Share, longest: float) -> bool:
    """Whether everybody can bear a step in which those at these places are drafted for."""
    waiting = share.seconds + share.delay
    if waiting > longest:
        return False
    gains = dict(zip(chosen, share.gains, strict=True))
    return all(
        [
            share.seconds <= each.allowed + each.token * gains[place] if place in gains else waiting <= each.allowed
            for place, each in enumerate(candidates)
        ]
    )


def _could_bear(candidates: Sequence[Candidate], seconds: float, longest: float) -> bool:
    """Whether everybody can bear that long, all being drafted for as far as can be."""
    most = [each.allowed + each.token * (each.branches + sum(each.survival)) for each in candidates]
    return seconds <= min(longest, *most)


_Found = tuple[int, Sequence[int], float, float, int]
"""Length, places of the members, expected tokens and seconds of the step, and draft tokens in it."""


def _share_of(candidates: Sequence[Candidate], step_seconds: Sequence[float], drafting: float, found: _Found) -> Share:
    length, chosen, expected, seconds, rows = found
    members = [candidates[at].index for at in chosen]
    delay = sum([candidates[at].delay for at in chosen])
    call = seconds - step_seconds[rows] - drafting
    gains = [
        each.branches - each.instead[1] + sum(each.survival[:length]) for each in map(candidates.__getitem__, chosen)
    ]
    return Share(members, length, expected / seconds, expected, seconds, call, delay, gains)


def _for_several(
    candidates: Sequence[Candidate],
    round_seconds: Sequence[float],
    step_seconds: Sequence[float],
    tokens: float,
    num_drafted: int,
    drafting: float,
    longest: float,
    *,
    bounded: bool,
) -> _Found | None:
    """What the loops need of candidates lies in lists by place: they run for every length and number of requests."""
    best: tuple[int, Sequence[int], int, float, float, int] | None = None
    best_rate = 0.0
    rate = tokens / (step_seconds[num_drafted] + drafting)
    survivals = [candidate.survival for candidate in candidates]
    cheapest = min((seconds / many for many, seconds in enumerate(round_seconds, 1)), default=0.0)
    gains = [candidate.branches - candidate.instead[1] for candidate in candidates]
    added = [-candidate.instead[0] for candidate in candidates]
    prices = [candidate.price for candidate in candidates]
    lost = [rate * price for price in prices]
    for length in range(1, 1 + max(map(len, survivals), default=0)):
        largest = 0.0
        for place, survival in enumerate(survivals):
            if length <= len(survival):
                chance = survival[length - 1]
                gains[place] += chance
                added[place] += 1
                if chance > largest:
                    largest = chance
        if largest < best_rate * cheapest:
            break  # nor does any token behind these bring what its round costs
        losses = [price - gain for price, gain in zip(lost, gains, strict=True)]
        order = sorted(range(len(losses)), key=losses.__getitem__)
        bears = _bounds(candidates, order, gains, longest) if bounded else ()
        expected, rows, price = tokens, num_drafted, drafting
        for many, place in enumerate(order):
            expected += gains[place]
            rows += added[place]
            price += prices[place]
            seconds = step_seconds[rows] + length * round_seconds[many] + price
            if expected > best_rate * seconds and (not bears or seconds <= bears[many]):
                best_rate = expected / seconds
                best = length, order, many + 1, expected, seconds, rows
    if best is None:
        return None
    length, order_of_best, many, expected, seconds, rows = best
    return length, order_of_best[:many], expected, seconds, rows


def _bounds(
    candidates: Sequence[Candidate], order: Sequence[int], gains: Sequence[float], longest: float
) -> list[float]:
    """Seconds that everybody can bear if the first 1, 2, ... of the order are drafted for, and gain so much."""
    members = [candidates[place] for place in order]
    waits = accumulate(each.delay for each in members)
    own = accumulate(
        (each.allowed + each.token * gains[place] for place, each in zip(order, members, strict=True)), min
    )
    others = [*accumulate((each.allowed for each in reversed(members)), min, initial=longest)][-2::-1]
    return [min(bears, patience - wait) for bears, patience, wait in zip(own, others, waits, strict=True)]


def _for_one(
    candidates: Sequence[Candidate],
    round_seconds: Sequence[float],
    step_seconds: Sequence[float],
    tokens: float,
    num_drafted: int,
    drafting: float,
    longest: float,
    *,
    bounded: bool,
) -> _Found | None:
    """The same where only one request may be drafted for, which is most often so."""
    (candidate,), one_round = candidates, round_seconds[0]
    best: _Found | None = None
    best_rate = 0.0
    expected = tokens + candidate.branches - candidate.instead[1]
    rows, fixed = num_drafted - candidate.instead[0], drafting + candidate.price
    patience = longest - candidate.delay
    for length, chance in enumerate(candidate.survival, 1):
        if chance < best_rate * one_round:
            break  # nor does any token behind this one bring what its round costs
        expected += chance
        seconds = step_seconds[rows + length] + length * one_round + fixed
        if expected > best_rate * seconds:
            bears = min(patience, candidate.allowed + candidate.token * (expected - tokens)) if bounded else math.inf
            if seconds <= bears:
                best, best_rate = (length, (0,), expected, seconds, rows + length), expected / seconds
    return best

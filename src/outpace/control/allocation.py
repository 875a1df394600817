"""How many draft tokens to verify and to ask for: pure functions of chances and seconds.

What is maximised is tokens per second, (decoding requests + chances of the draft tokens to be kept) / seconds, with the
tokens of requests that have had many counting less (`fairness`), among the steps that every request can bear (`floor`).
They are taken in the order of their chance times what they count over all requests, which for a given count is the best
choice, since chances fall along each draft. Every count is looked at: seconds have steps, and what does not pay for one
more row may pay for four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from outpace.control.floor import Limits

__all__ = ["Candidate", "Plan", "Share", "allocate", "choose_computed"]


@dataclass(slots=True)
class Plan:
    """Tokens to verify.

    Args:
        counts: one a request.
        tokens: expected of the step: one for each decoding request, and the draft tokens that are kept.
        seconds: expected of the step.
        second_best: where no tokens are worth it, the best plan with some; None if there is none.
        held: whether a better one was not made, since somebody could not bear it.
    """

    counts: list[int]
    tokens: float
    seconds: float
    second_best: Plan | None = None
    held: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def allocate(
    survivals: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    decoding: int,
    at_least: Sequence[int] | None = None,
    margin: float = 0.0,
    values: Sequence[float] | None = None,
    limits: Limits | None = None,
) -> Plan:
    """The numbers of tokens that bring the most tokens per second.

    Args:
        survivals: of every request, the chances that its draft tokens are kept, each no more than the one before it.
        seconds: [1 + all tokens] of the step with 0, 1, 2, ... draft tokens; never falling.
        decoding: requests that get a token each in any case, at least 1 for a rate.
        at_least: tokens of every request that are verified in any case.
        margin: by how much drafts must beat the fewest tokens possible, relative.
        values: what a token of every request counts, 1 on average over those that decode; None where it is 1 for all.
        limits: how long the step may take, if it has more draft tokens than those at least.
    """
    bare = survivals
    if values is not None:
        survivals = [[value * chance for chance in chances] for value, chances in zip(values, survivals, strict=True)]
    counts = [0] * len(survivals) if at_least is None else list(at_least)
    if len(survivals) == 1:
        begin, chances = counts[0], survivals[0]
        order = None
    else:
        every = [
            (chance, index)
            for index, survival in enumerate(survivals)
            for chance in (survival[counts[index] :] if counts[index] else survival)
        ]
        every.sort(key=_chance, reverse=True)  # of equal ones those of the first requests first
        order = [index for _, index in every]
        begin = sum(counts)
        chances = [0.0] * begin + [chance for chance, _ in every]
    tokens = float(decoding) + sum(sum(survival[:count]) for survival, count in zip(survivals, counts, strict=True))
    best, best_tokens, base = begin, tokens, tokens / seconds[begin]
    rest, rest_tokens, rest_rate = begin, 0.0, -1.0
    best_rate = enough = base * (1.0 + margin)
    bearable = None if limits is None else _Bearable(limits, bare, counts, order)
    for count in range(begin + 1, len(chances) + 1):
        tokens += chances[count - 1]
        if tokens > best_rate * seconds[count] and (bearable is None or bearable(count - begin, seconds[count])):
            best, best_tokens, best_rate = count, tokens, tokens / seconds[count]
        if tokens > rest_rate * seconds[count]:
            rest, rest_tokens, rest_rate = count, tokens, tokens / seconds[count]
    second = None
    if not best and rest:
        second = Plan(_counts(counts, order, rest), rest_tokens, seconds[rest])
    held = rest_rate > max(best_rate, enough)
    return Plan(_counts(counts, order, best - begin), best_tokens, seconds[best], second, held)


class _Bearable:
    """Whether a step with so many more draft tokens is one that every request can bear.

    Args:
        limits: of the step.
        survivals: chances of all tokens, whatever they are worth.
        counts: tokens of every request in any case.
        order: whose the tokens are that come to them; None where there is one request.
    """

    def __init__(
        self,
        limits: Limits,
        survivals: Sequence[Sequence[float]],
        counts: Sequence[int],
        order: Sequence[int] | None,
    ) -> None:
        self._limits, self._survivals, self._order = limits, survivals, order
        self._counts, self._more = list(counts), 0
        self._allowed = limits.with_drafts(survivals, counts)

    def __call__(self, more: int, seconds: float) -> bool:
        """Of `more` tokens, never fewer than the last time."""
        for place in range(self._more, more):
            index = 0 if self._order is None else self._order[place]
            self._allowed[index] += self._limits.token * self._survivals[index][self._counts[index]]
            self._counts[index] += 1
        self._more = more
        return seconds <= min(self._limits.others, *self._allowed)


def _counts(counts: Sequence[int], order: Sequence[int] | None, more: int) -> list[int]:
    """With so many tokens more, in this order of the requests; None where there is only one."""
    found = list(counts)
    if order is None:
        found[0] += more
    else:
        for index in order[:more]:
            found[index] += 1
    return found


_chance = itemgetter(0)


@dataclass(slots=True)
class Candidate:
    """A request that a computing drafter could draft for.

    Args:
        index: of the request.
        survival: chances of the tokens it would draft, up to the most it may.
        instead: (tokens, chances in sum) of the draft at hand that would be dropped for it.
        price: seconds of catching up, as far as this step has to bear them.
        branches: tokens that branches of the draft bring, what they cost deducted.
        allowed: seconds that the step may take by the tokens drafted for it, 0 of them first; empty if nobody says.
    """

    index: int
    survival: list[float]
    instead: tuple[int, float] = (0, 0.0)
    price: float = 0.0
    branches: float = 0.0
    allowed: Sequence[float] = ()

    def bears(self, seconds: float, length: int = 0) -> bool:
        """Whether the step may take that long if so many tokens are drafted for it."""
        return not self.allowed or seconds <= self.allowed[min(length, len(self.allowed) - 1)]


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
    """

    members: list[int]
    num_tokens: int
    rate: float
    tokens: float
    seconds: float
    drafting: float


def choose_computed(
    candidates: Sequence[Candidate],
    round_seconds: Sequence[float],
    step_seconds: Sequence[float],
    *,
    tokens: float,
    num_drafted: int = 0,
    drafting: float = 0.0,
    longest: float = math.inf,
) -> Share | None:
    """The best rate with a computing drafter for one request at least; None if all can bear none of that.

    For every length, requests are taken in order of what the drafter brings them over what they have; every number of
    requests is looked at, as one call drafts for all of them at the price of little more than one.

    Args:
        candidates: who could be drafted for.
        round_seconds: [candidates] of one token for each of 1, 2, ... requests.
        step_seconds: of the step with 0, 1, 2, ... draft tokens, as many as there could be.
        tokens: expected of the step without this drafter.
        num_drafted: draft tokens of the step without this drafter.
        drafting: seconds of calls that are made anyway.
        longest: seconds that the step may take for those who are no candidates.
    """
    if len(candidates) == 1:
        return _for_one(candidates[0], round_seconds[0], step_seconds, tokens, num_drafted, drafting, longest)
    best: tuple[int, list[int], float, float, int] | None = None
    best_rate = 0.0
    rate = tokens / (step_seconds[num_drafted] + drafting)
    most = max((len(candidate.survival) for candidate in candidates), default=0)
    cheapest = min((seconds / many for many, seconds in enumerate(round_seconds, 1)), default=0.0)
    sums = [candidate.branches - candidate.instead[1] for candidate in candidates]
    prices = [rate * candidate.price for candidate in candidates]
    for length in range(1, 1 + most):
        largest = 0.0
        for place, candidate in enumerate(candidates):
            if length <= len(candidate.survival):
                chance = candidate.survival[length - 1]
                sums[place] += chance
                if chance > largest:
                    largest = chance
        if largest < best_rate * cheapest:
            break  # nor does any token behind these bring what its round costs
        losses = [price - gain for price, gain in zip(prices, sums, strict=True)]
        order = sorted(range(len(losses)), key=losses.__getitem__)
        expected, rows, price = tokens, num_drafted, drafting
        for many, place in enumerate(order):
            candidate = candidates[place]
            expected += sums[place]
            rows += min(length, len(candidate.survival)) - candidate.instead[0]
            price += candidate.price
            seconds = step_seconds[rows] + length * round_seconds[many] + price
            better = expected > best_rate * seconds and seconds <= longest
            if better and _bear(candidates, order, many, seconds, length):
                best_rate = expected / seconds
                best = length, order[: many + 1], expected, seconds, rows
    if best is None:
        return None
    length, chosen, expected, seconds, rows = best
    members = [candidates[at].index for at in chosen]
    return Share(members, length, best_rate, expected, seconds, seconds - step_seconds[rows] - drafting)


def _bear(candidates: Sequence[Candidate], order: Sequence[int], last: int, seconds: float, length: int) -> bool:
    """Whether all can bear a step in which those up to the place `last` of the order have drafts."""
    return all(candidates[at].bears(seconds, length if place <= last else 0) for place, at in enumerate(order))


def _for_one(
    candidate: Candidate,
    one_round: float,
    step_seconds: Sequence[float],
    tokens: float,
    num_drafted: int,
    drafting: float,
    longest: float,
) -> Share | None:
    """The same where only one request may be drafted for, which is most often so."""
    best, best_rate, best_expected, best_seconds = 0, 0.0, 0.0, 0.0
    expected = tokens + candidate.branches - candidate.instead[1]
    rows, fixed = num_drafted - candidate.instead[0], drafting + candidate.price
    for length, chance in enumerate(candidate.survival, 1):
        if chance < best_rate * one_round:
            break  # nor does any token behind this one bring what its round costs
        expected += chance
        seconds = step_seconds[rows + length] + length * one_round + fixed
        if expected > best_rate * seconds and seconds <= longest and candidate.bears(seconds, length):
            best, best_rate, best_expected, best_seconds = length, expected / seconds, expected, seconds
    if not best:
        return None
    call = best_seconds - step_seconds[rows + best] - drafting
    return Share([candidate.index], best, best_rate, best_expected, best_seconds, call)

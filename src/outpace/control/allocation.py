"""How many draft tokens to verify: a pure function of chances and seconds.

What is maximised is tokens per second, (decoding requests + chances of the draft tokens to be kept) / seconds, with the
tokens of requests that have had many counting less (`fairness`), among the steps that every request can bear (`floor`).
They are taken in the order of their chance times what they count over all requests, which for a given count is the best
choice, since chances fall along each draft. Every count is looked at: seconds have steps, and what does not pay for one
more row may pay for four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from outpace.control.floor import Limits

__all__ = ["Plan", "allocate"]


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
    least, base = tokens, tokens / seconds[begin]
    best, best_tokens = begin, tokens
    rest, rest_tokens, rest_rate = begin, 0.0, -1.0
    best_rate = enough = base * (1.0 + margin)
    for count in range(begin + 1, len(chances) + 1):
        tokens += chances[count - 1]
        if tokens > best_rate * seconds[count]:
            best, best_tokens, best_rate = count, tokens, tokens / seconds[count]
        if tokens > rest_rate * seconds[count]:
            rest, rest_tokens, rest_rate = count, tokens, tokens / seconds[count]
    held = False
    if (
        limits is not None
        and best > begin
        and not limits.bear(bare, _counts(counts, order, best - begin), seconds[best])
    ):
        held, more = True, _bearable(limits, bare, counts, order, chances[begin:], seconds[begin:], least, enough)
        best, best_tokens = begin + more, least + sum(chances[begin : begin + more])
    second = None
    if not best and rest:
        second = Plan(_counts(counts, order, rest), rest_tokens, seconds[rest])
    return Plan(_counts(counts, order, best - begin), best_tokens, seconds[best], second, held)


def _bearable(
    limits: Limits,
    survivals: Sequence[Sequence[float]],
    counts: Sequence[int],
    order: Sequence[int] | None,
    chances: Sequence[float],
    seconds: Sequence[float],
    tokens: float,
    enough: float,
) -> int:
    """How many more tokens bring the most a second among the steps that every request can bear.

    Args:
        limits: of the step.
        survivals: chances of all tokens, whatever they are worth.
        counts: tokens of every request in any case.
        order: whose the tokens are that come to them; None where there is one request.
        chances: of these, times what they count.
        seconds: of the step with 0, 1, 2, ... of them.
        tokens: expected of the step without them.
        enough: tokens per second that they must exceed.
    """
    allowed, reached = limits.with_drafts(survivals, counts), list(counts)
    # Those for whom nothing is drafted bear no more, however many tokens the others have; steps only get longer.
    longest = min([limits.others, *(one for one, chain in zip(allowed, survivals, strict=True) if not chain)])
    best, best_rate = 0, enough
    for place, chance in enumerate(chances):
        if seconds[place + 1] > longest:
            break
        index = 0 if order is None else order[place]
        allowed[index] += limits.token * survivals[index][reached[index]]
        reached[index] += 1
        tokens += chance
        if tokens > best_rate * seconds[place + 1] and seconds[place + 1] <= min(allowed):
            best, best_rate = place + 1, tokens / seconds[place + 1]
    return best


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

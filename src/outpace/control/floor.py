"""No request of a batch pays more than a small share of its plain rate for the drafts of the others.

Proportional fairness (`fairness`) lets one request lose where others gain enough. The floor ends that: a step may take
as long as every request that decodes in it can bear. What it can bear is told by an account of its own, in seconds:
plain steps for the tokens it got and will get, over the floor, less the seconds that went by. Who gains by its own
drafts can bear long steps; who gains nothing, next to none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.control.requests import Requests, RequestState

__all__ = ["Limits", "enter", "limits"]

_FADE = 1.0 - 1.0 / 256.0
"""Of an account, with every step: nobody pays for a lead of long ago."""

_CREDIT = 64.0
"""Plain steps of which the share that may be lost can be lost at once by a new request."""


@dataclass(slots=True)
class Limits:
    """How long a step may take.

    Args:
        allowed: seconds, for every wish, if no token is drafted for it.
        token: seconds more for every token that is expected to be kept.
        others: seconds, for those that decode without a wish.
    """

    allowed: list[float]
    token: float
    others: float

    def later(self, seconds: float) -> Limits:
        """The same where so much goes by in any case."""
        return Limits([allowed + seconds for allowed in self.allowed], self.token, self.others + seconds)

    def bear(self, survivals: Sequence[Sequence[float]], counts: Sequence[int], seconds: float) -> bool:
        """Whether everybody can bear a step of so many seconds, with so many tokens of these chances."""
        return seconds <= min([self.others, *self.with_drafts(survivals, counts)])

    def with_drafts(self, survivals: Sequence[Sequence[float]], counts: Sequence[int]) -> list[float]:
        """`allowed`, with so many tokens of these chances."""
        return [
            allowed + self.token * sum(survival[:count]) if count else allowed
            for allowed, survival, count in zip(self.allowed, survivals, counts, strict=True)
        ]


def limits(requests: Requests, ids: Sequence[int], decoding: int, plain: float, floor: float) -> Limits | None:
    """What the requests of a step can bear; None where nobody is alone in gaining, or there is no floor.

    Args:
        requests: with their accounts.
        ids: of the wishes.
        decoding: requests that get a token each, those without a wish included.
        plain: seconds of the step without drafts.
        floor: share of its plain rate that everybody keeps; 0: none.
    """
    if decoding < 2 or not floor:
        return None
    share, credit = 1.0 / floor, _CREDIT * plain
    others = math.inf
    if len(ids) < decoding:  # who they are is not said: those of the last step, or one that has no account yet
        rest = requests.running.difference(ids)
        others = min(_allowed([requests[other] for other in rest] or [RequestState()], plain, share, credit))
    return Limits(_allowed([requests[each] for each in ids], plain, share, credit), plain * share, others)


def _allowed(states: Sequence[RequestState], plain: float, share: float, credit: float) -> list[float]:
    """Seconds of the next step that requests can bear which get one token each in it.

    Args:
        states: of the requests.
        plain: seconds of the step without drafts.
        share: seconds that may pass for every second of plain steps.
        credit: seconds of plain steps of which a new request may lose its share at once.
    """
    extra = share - 1.0
    return [
        share * (state.plain_seconds + plain)
        - state.seconds
        + (extra * (credit - state.plain_seconds) if state.plain_seconds < credit else 0.0)
        for state in states
    ]


def enter(states: Sequence[RequestState], tokens: Sequence[float], plain: float, seconds: Sequence[float]) -> None:
    """A step, by request: the tokens it was to bring, for each of which plain ones take so long, and what it took."""
    for state, expected, took in zip(states, tokens, seconds, strict=True):
        state.plain_seconds = _FADE * state.plain_seconds + plain * expected
        state.seconds = _FADE * state.seconds + took

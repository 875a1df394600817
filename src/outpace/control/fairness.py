"""What a token is worth: less to a request that has had many, so that those who gain nothing pay less for the others.

Draft tokens of one request make the step longer for all that decode beside it. The most tokens per second in sum may
be had by slowing many down a little for one that becomes much faster. Valued by one over what each request gets on
average, tokens are shared such that no other choice raises the rates of some by more, in relation, than it lowers
those of others: proportional fairness, Kelly, Maulloo, Tan "Rate control for communication networks" (1998).
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.control.requests import Requests

__all__ = ["token_values"]

_PRIOR = 8
"""Plain steps that count as made when a request begins."""


def token_values(requests: Requests, ids: Sequence[int], decoding: int) -> list[float] | None:
    """Of a token of each request, 1 on average over all decoding ones; None where they are all the same.

    Args:
        requests: what became of them so far.
        ids: of those with a wish; to the others a token is worth what it is to one that never drafted.
        decoding: requests that get a token, those without a wish included.
    """
    if decoding < 2 or not ids:
        return None
    values = []
    for request_id in ids:
        state = requests[request_id]
        values.append((_PRIOR + state.num_steps) / (_PRIOR + state.num_tokens))
    scale = decoding / (sum(values) + decoding - len(ids))
    return [scale * value for value in values]

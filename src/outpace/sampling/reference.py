"""The definition of `choose` in plain Python: slow, obvious, float64.

`choose.py` has to give the same token for every row; where it cannot decide within its error bounds, it asks here.

Arithmetic, fixed once for both: s = (z - max z) / T in float64; min_p compares s with log(min_p); order is
(z descending, then lowest id); top_p compares running sums of exp(s), added in that order, with top_p times the last of
them; the score is s plus Gumbel noise, and the lowest id wins a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from outpace.params import SamplingParams
from outpace.sampling.noise import gumbel, key_of
from outpace.types import Choice

__all__ = ["choose_reference", "filtered_law", "survivors"]


def choose_reference(logits: Sequence[float], choice: Choice) -> int:
    """The token of one row.

    Args:
        logits: [V] float32 values without NaN or +inf, at least one of them finite; -inf is never chosen. The rules of
            the choice have been applied.
        choice: resolved parameters and the noise key's fields.
    """
    if choice.params.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    key = key_of(choice)
    kept = survivors(logits, choice.params)
    return max(kept, key=lambda token: (kept[token] + gumbel(key, token), -token))


def survivors(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that min_p, top_k and top_p leave, in order, each with its scaled logit s (0 for the best).

    Args:
        logits: [V] float32 values, as for `choose_reference`.
        params: resolved, temperature above 0.
    """
    temperature, top_k, top_p = params.temperature, params.top_k, params.top_p
    if temperature is None or top_k is None or top_p is None:
        raise ValueError("temperature, top_k and top_p must be resolved first")
    best = max(logits)
    order = sorted((t for t, z in enumerate(logits) if z > -math.inf), key=lambda t: (-logits[t], t))
    scaled = {token: (logits[token] - best) / temperature for token in order}
    if params.min_p > 0:
        bar = math.log(params.min_p)
        order = [token for token in order if scaled[token] >= bar]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass_up_to = list(accumulate(math.exp(scaled[token]) for token in order))
        goal = top_p * mass_up_to[-1]
        before = [0.0, *mass_up_to]
        order = [token for rank, token in enumerate(order) if before[rank] < goal]
    return {token: scaled[token] for token in order}


def filtered_law(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The probability of every token that can be chosen, temperature above 0."""
    kept = survivors(logits, params)
    total = math.fsum(math.exp(s) for s in kept.values())
    return {token: math.exp(s) / total for token, s in kept.items()}

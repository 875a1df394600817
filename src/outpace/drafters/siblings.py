"""The tokens a target is most likely to choose after a row of a draft model's logits: several, where a chain takes one.

Under the coupled rule the target chooses argmax(log p + g) with noise g that is known before. So the draft model's
best guesses are the best of log q + g, and how likely each is follows from how far apart they lie: where the logits of
the two models differ by independent Gumbel errors of scale 1, token i is chosen with chance softmax(log q + g)_i.
Greedily g is 0, and that is the draft model's own probability.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.choose import NO_TOKEN, choose_each, processed, top_indices
from outpace.sampling.noise import gumbel, key_of
from outpace.sampling.race import Floats
from outpace.types import Choice

__all__ = ["Sibling", "siblings"]

_CONTENDERS = 24
"""Most likely tokens whose noise is looked at; the best of all tokens is found however unlikely it was."""


_COLD = 1e-4
"""Below this temperature no noise makes up for a difference between logits, and dividing by it may overflow."""


class Sibling(NamedTuple):
    """A token, and how likely the target chooses it, as far as one can tell from here."""

    token: int
    chance: float


def siblings(logits: torch.Tensor, choice: Choice, width: int) -> list[Sibling]:
    """The best tokens, the most likely first; the first is the draft model's own choice.

    Args:
        logits: [V] float32, the draft model's.
        choice: how the token there is chosen.
        width: most tokens, at least 1.

    Returns:
        Fewer, or none, where the rules of the request allow no more or the logits are not numbers.
    """
    try:
        values = processed(logits.detach().to("cpu", torch.float32).numpy(), choice)
    except OutpaceError:
        return []
    best = float(values.max(initial=-math.inf))
    if not math.isfinite(best):
        return []
    temperature = choice.params.temperature
    assert temperature is not None
    greedy = temperature < _COLD
    return _most_likely(values, best, width) if greedy else _best_in_race(values, best, choice, width)


def _most_likely(values: Floats, best: float, width: int) -> list[Sibling]:
    total = float(np.exp(values - np.float32(best)).sum())
    return [
        Sibling(token, math.exp(float(values[token]) - best) / total)
        for token in _descending(values, width)
        if values[token] > -np.inf
    ]


def _best_in_race(values: Floats, best: float, choice: Choice, width: int) -> list[Sibling]:
    (winner,) = choose_each(torch.from_numpy(values)[None], [_without_rules(choice)]).tokens
    if winner == NO_TOKEN:
        return []
    temperature, key = choice.params.temperature, key_of(choice)
    assert temperature is not None
    tokens = {winner, *_contenders(values, best, choice.params)}
    scores = {token: (float(values[token]) - best) / temperature + gumbel(key, token) for token in tokens}
    top = scores[winner]  # another is no better, but where a filter's edge was seen differently
    weights = {token: math.exp(min(0.0, score - top)) for token, score in scores.items()}
    total = sum(weights.values())
    order = sorted(tokens, key=lambda token: (token != winner, -scores[token], token))
    return [Sibling(token, weights[token] / total) for token in order[:width]]


def _contenders(values: Floats, best: float, params: SamplingParams) -> list[int]:
    """The most likely tokens that the filters leave. Their edges may lie a little elsewhere: that costs a guess."""
    assert params.temperature is not None and params.top_k is not None and params.top_p is not None
    order = _descending(values, min(_CONTENDERS, params.top_k) if params.top_k > 0 else _CONTENDERS)
    scaled = (values[order].astype(np.float64) - best) / params.temperature
    kept = scaled > -math.inf
    if params.min_p is not None and params.min_p > 0:
        kept &= scaled >= math.log(params.min_p)
    if params.top_p < 1:
        weights = np.exp(scaled)
        total = float(weights[kept].sum())
        if not 0 < params.top_k <= len(order):
            scale = np.float32(max(1 / params.temperature, 1e-30))  # not 0, which no -inf survives
            total = float(np.exp((values - np.float32(best)) * scale).sum())
        kept &= np.cumsum(weights) - weights < params.top_p * total
    return [token for token, keep in zip(order, kept, strict=True) if keep]


def _without_rules(choice: Choice) -> Choice:
    """For values that the rules have been applied to."""
    return Choice(choice.params, choice.seed, choice.position, choice.number, purpose=choice.purpose)


def _descending(values: Floats, count: int) -> list[int]:
    """The `count` largest, of equal values the lowest id first."""
    found = np.arange(values.size) if count >= values.size else top_indices(values, count)
    order: list[int] = found[np.lexsort((found, -values[found]))].tolist()
    return order

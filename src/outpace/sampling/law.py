"""The law of `choose_rows`: how likely each token is, for the rules of verification that compare probabilities.

The definition is `reference.filtered_law`. This module keeps the same tokens without sorting the vocabulary: min_p and
top_k need no order, and for top_p only the few tokens that may be in the nucleus are sorted. Running sums of the two
may differ in the last bits, so a nucleus whose edge is closer than `_MASS_MARGIN` is left to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.choose import bad_row, processed, top_indices
from outpace.sampling.race import Floats, Indices
from outpace.sampling.reference import survivors
from outpace.types import Choice

__all__ = ["Laws", "law_rows", "log_law"]

_Weights: TypeAlias = NDArray[np.float64]

_MASS_MARGIN = 1e-9
"""Error bound of a sum of weights, relative to the total: a million float64 additions are off by 2e-10 at most."""

_SMALL = 512
"""Sorting this many tokens costs less than narrowing them down."""


@dataclass(frozen=True, slots=True)
class Laws:
    """Probabilities of many rows.

    Args:
        rows: [R, V] float64; every row sums to 1, or is all zero where it allows no choice.
        errors: why not, by row.
    """

    rows: NDArray[np.float64]
    errors: dict[int, str] = field(default_factory=dict)


def law_rows(logits: torch.Tensor, choices: Sequence[Choice]) -> Laws:
    """The probability of every token at every row, under the rules and parameters of the row's choice.

    Args:
        logits: [R, V] float32, any strides; -inf marks tokens that must not be chosen.
        choices: [R] parameters, rules and path of each row; temperature 0 is a point mass on the best token.

    Returns:
        Each row depends on its own logits and choice only; a row that allows no choice costs the others nothing.

    Raises:
        ValueError: `choices` does not have one entry a row, or its parameters are not resolved.
    """
    if logits.ndim != 2 or logits.shape[0] != len(choices):
        raise ValueError(f"{len(choices)} choices for logits of shape {list(logits.shape)}")
    values = logits.detach().to("cpu", torch.float32).numpy()
    laws = Laws(np.zeros(values.shape, np.float64))
    # Differences of huge logits may overflow to -inf: such a token has weight 0, which is right.
    with np.errstate(over="ignore"):
        for index, choice in enumerate(choices):
            try:
                _fill(laws.rows[index], processed(values[index], choice), choice, index)
            except OutpaceError as error:
                laws.errors[index] = str(error)
    return laws


def log_law(values: Floats, choice: Choice) -> _Weights:
    """[V] log probabilities of one row, -inf where a filter leaves a token out, however small the others are.

    Args:
        values: [V] logits after the rules of the choice.
        choice: resolved parameters, temperature above 0.

    Raises:
        OutpaceError: the row allows no choice.
    """
    with np.errstate(over="ignore"):
        ids, scaled = _filtered(values, choice, 0)
        logs = np.full(values.size, -math.inf)
        logs[slice(None) if ids is None else ids] = scaled - math.log(float(np.exp(scaled).sum()))
    return logs


def _fill(law: _Weights, values: Floats, choice: Choice, row: int) -> None:
    """Writes the law of one row over zeros."""
    if choice.params.temperature == 0:
        _check(values, choice, row)
        law[values.argmax()] = 1.0
        return
    ids, weights = _filtered(values, choice, row)
    np.exp(weights, out=weights)
    weights /= weights.sum()
    law[slice(None) if ids is None else ids] = weights


def _filtered(values: Floats, choice: Choice, row: int) -> tuple[Indices | None, _Weights]:
    """The ids that the filters leave (None: all) and their scaled logits s, 0 for the best."""
    best = _check(values, choice, row)
    assert choice.params.temperature is not None
    found = _survivors(values, best, choice.params.temperature, choice.params)
    if found is not None:
        return found
    exact = survivors(values.tolist(), choice.params)
    return np.array(list(exact), np.intp), np.array(list(exact.values()))


def _check(values: Floats, choice: Choice, row: int) -> float:
    """The largest logit."""
    best = float(values.max(initial=-math.inf))
    if not math.isfinite(best):
        raise OutpaceError(bad_row(best, row, choice.position))
    params = choice.params
    if params.temperature is None or params.top_k is None or params.top_p is None:
        raise ValueError(f"row {row}: temperature, top_k and top_p must be resolved first")
    return best


def _survivors(
    values: Floats, best: float, temperature: float, params: SamplingParams
) -> tuple[Indices | None, _Weights] | None:
    """Ascending ids the filters leave (None: all) and their scaled logits, or None if an edge is too close to call."""
    ids: Indices | None = None
    kept = values
    if params.min_p is not None and params.min_p > 0:
        ids = np.flatnonzero((values.astype(np.float64) - best) / temperature >= math.log(params.min_p))
        kept = values[ids]
    if params.top_k is not None and 0 < params.top_k < kept.size:
        top = top_indices(kept, params.top_k)
        ids, kept = top if ids is None else ids[top], kept[top]
    scaled = kept.astype(np.float64)
    scaled -= best
    scaled /= temperature
    if params.top_p is None or params.top_p >= 1:
        return ids, scaled
    inside = _nucleus(kept, np.exp(scaled), params.top_p)
    if inside is None:
        return None
    return (inside if ids is None else ids[inside]), scaled[inside]


def _nucleus(values: Floats, weights: _Weights, top_p: float) -> Indices | None:
    """Ascending indices of the tokens before which less than top_p of the mass lies; None if too close to call."""
    total = float(weights.sum())
    near = _candidates(weights, total, top_p)
    order = near[np.argsort(-values[near], kind="stable")]
    before = np.concatenate(([0.0], np.cumsum(weights[order])[:-1]))
    goal, margin = top_p * total, _MASS_MARGIN * total
    count = max(int(np.searchsorted(before, goal)), 1)  # nothing is before the first: it is inside whatever rounds
    near_edge = before[max(count - 1, 1) : count + 1]
    if near_edge.size and np.abs(near_edge - goal).min() <= margin:
        return None
    inside: Indices = np.sort(order[:count])
    return inside


def _candidates(weights: _Weights, total: float, top_p: float) -> Indices:
    """Ascending indices of a prefix of the order that holds the nucleus and the token behind it, without sorting.

    n tokens lighter than b / n weigh less than b together; b is what may be dropped and still leave more than top_p of
    the total: (1 - top_p) of it, less a margin and what was dropped before.
    """
    near: Indices = np.arange(weights.size)
    budget = (1 - top_p - 2 * _MASS_MARGIN) * total
    while budget > 0 and near.size > _SMALL:
        heavy = near[weights[near] >= budget / near.size]
        if heavy.size > near.size // 2:
            break
        near = heavy
        budget = (1 - top_p - 2 * _MASS_MARGIN) * total - (total - float(weights[near].sum()))
    return near

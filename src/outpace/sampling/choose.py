"""`choose_rows`: the target's token for every row of a step, as a pure function of each row alone.

The definition is `reference.py`. This module reaches the same token without scoring the whole vocabulary in float64:
float32 numpy passes narrow the row down to a few tokens, always keeping every token that could still win within the
error bounds stated below, and the few are scored by the definition itself. A boundary closer than the error bounds
(about one row in 50,000 with top_p) is left to the reference. So the result does not depend on how a kernel rounds,
on the number of threads, on the other rows or on the memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.errors import OutpaceError
from outpace.sampling.noise import key_of
from outpace.sampling.race import Floats, Indices, RowContext, Tokens, race, scratch
from outpace.sampling.reference import choose_reference
from outpace.types import Choice

__all__ = [
    "NO_TOKEN",
    "Chosen",
    "bad_row",
    "choose_each",
    "choose_rows",
    "fault_of",
    "processed",
    "top_indices",
]

NO_TOKEN = -1
"""Stands where a row allows no choice: no draft token equals it, so it counts only if the walk ends there."""

_MASS_MARGIN = 2e-5
"""Error bound of a difference of two masses, relative to the total. Weights are float32 exp of float32 s, each off by
at most |s| * 3 * 2**-24 + 2**-22; with up to a million tokens the sum is off by 3e-6, summation adds less than 2e-6."""

_TEMPERATURES = (1e-30, 1e30)
"""Outside these limits float32 cannot hold s or 1 / T; the reference answers."""

_Float = TypeVar("_Float", np.float32, np.float64)

_SMALL = 512
"""Sets of at most this many tokens are not worth narrowing further."""


def choose_rows(logits: torch.Tensor, choices: Sequence[Choice]) -> list[int]:
    """The target's token for every row.

    Args:
        logits: [R, V] float32, any strides; -inf marks tokens that must not be chosen.
        choices: [R] parameters, seed, position and choice number of each row.

    Returns:
        [R] token ids. Each depends on its own row and choice only.

    Raises:
        OutpaceError: a row has NaN or +inf, or no finite logit; names the row and its position.
        ValueError: `choices` does not have one entry a row, or its parameters are not resolved.
    """
    chosen = choose_each(logits, choices)
    if chosen.errors:
        raise OutpaceError(min(chosen.errors.items())[1])
    return chosen.tokens


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of many rows.

    Args:
        tokens: [R] ids, NO_TOKEN where a row allows no choice.
        errors: why not, by row.
    """

    tokens: list[int]
    errors: dict[int, str] = field(default_factory=dict)


def choose_each(logits: torch.Tensor, choices: Sequence[Choice]) -> Chosen:
    """`choose_rows` in which a row that allows no choice costs the others nothing."""
    if logits.ndim != 2 or logits.shape[0] != len(choices):
        raise ValueError(f"{len(choices)} choices for logits of shape {list(logits.shape)}")
    rows = logits.detach().to("cpu", torch.float32).numpy()
    chosen = Chosen([NO_TOKEN] * len(choices))
    # Differences of huge logits may overflow to -inf: such a token has weight 0, which is right.
    with np.errstate(over="ignore"):
        for index, choice in enumerate(choices):
            try:
                chosen.tokens[index] = _choose(processed(rows[index], choice), choice, index)
            except OutpaceError as error:
                chosen.errors[index] = str(error)
    return chosen


def processed(values: Floats, choice: Choice) -> Floats:
    """[V] logits of a row after the rules of its request; the row itself stays as it is.

    Raises:
        OutpaceError: a rule failed or left no token.
    """
    return values if choice.rules is None else choice.rules(values, choice.path)


def _choose(values: Floats, choice: Choice, row: int) -> int:
    token = int(values.argmax()) if values.size else -1  # the first NaN, if there is one
    best = float(values[token]) if values.size else -math.inf
    if not math.isfinite(best):
        raise OutpaceError(bad_row(best, row, choice.position))
    temperature = choice.params.temperature
    if temperature is None or choice.params.top_k is None or choice.params.top_p is None:
        raise ValueError(f"row {row}: temperature, top_k and top_p must be resolved first")
    if temperature == 0:
        return token
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
        return choose_reference(values.tolist(), choice)
    winner = _sample(Tokens(None, np.ascontiguousarray(values)), choice, RowContext(best, temperature, key_of(choice)))
    return choose_reference(values.tolist(), choice) if winner is None else winner


def fault_of(best: float) -> str:
    """What is wrong with logits whose largest value is this, NaN counting as larger than all."""
    return "NaN" if math.isnan(best) else "+inf" if best > 0 else "no finite value"


def bad_row(best: float, row: int, position: int) -> str:
    """The message about a row that allows no choice."""
    return (
        f"logits row {row} (position {position}) has {fault_of(best)}, so no token can be chosen; "
        "check the weights and whatever masks or changes logits"
    )


def _sample(tokens: Tokens, choice: Choice, row: RowContext) -> int | None:
    """The winner among the tokens that the filters leave, or None if a boundary is too close to call."""
    params = choice.params
    if params.min_p is not None and params.min_p > 0:
        tokens = _keep_min_p(tokens, params.min_p, row)
    if params.top_k is not None and 0 < params.top_k < tokens.values.size:
        tokens = tokens.take(top_indices(tokens.values, params.top_k))
    if params.top_p is not None and params.top_p < 1:
        return _race_within_nucleus(tokens, params.top_p, row)
    return tokens.id_at(race(tokens, row))


def _keep_min_p(tokens: Tokens, min_p: float, row: RowContext) -> Tokens:
    bar = math.log(min_p)
    reach = row.temperature * bar
    rounding = 1e-12 * (abs(row.best) + abs(reach))
    keep = tokens.values >= _below(row.best + reach - rounding)
    edge = np.flatnonzero(keep & (tokens.values <= -_below(-(row.best + reach + rounding))))
    keep[edge] = (tokens.values[edge].astype(np.float64) - row.best) / row.temperature >= bar
    return tokens.take(np.flatnonzero(keep)) if not keep.all() else tokens


def _below(value: float) -> np.float32:
    """The next float32 under a float64, so that `>=` in float32 never loses a token."""
    return np.float32(np.nextafter(np.float32(value), np.float32(-np.inf)))


def top_indices(values: NDArray[_Float], k: int) -> Indices:
    """Ascending indices of the k largest values, 1 <= k <= [n]; of equal values at the edge the first ones."""
    near = np.flatnonzero(values >= _kth_from_groups(values, k))
    inside = values[near]
    edge = np.partition(inside, inside.size - k)[inside.size - k]
    keep = inside > edge
    ties = np.flatnonzero(inside == edge)
    keep[ties[: k - int(keep.sum())]] = True
    kept: Indices = near[keep]
    return kept


def _kth_from_groups(values: NDArray[_Float], k: int) -> float:
    """A value that at least k values reach: the k-th largest among the maxima of disjoint groups."""
    groups = values.size // 64
    if groups < 2 * k:
        return -math.inf
    maxima = values[: groups * 64].reshape(64, groups).max(axis=0)
    return float(np.partition(maxima, groups - k)[groups - k])


def _race_within_nucleus(tokens: Tokens, top_p: float, row: RowContext) -> int | None:
    """The winner inside the nucleus, without sorting.

    The nucleus is a prefix of the order, so a token is inside exactly when the mass before it is below top_p of the
    total. Whoever wins a race over more than the nucleus and is inside has won in the nucleus; if the winner is
    outside, so is everyone after it, and the race is run again among those before it.
    """
    weights = _weights(tokens.values, row)
    total = float(weights.sum())
    tokens, weights = _shrink_to_nucleus(tokens, weights, total, top_p, row)
    goal, margin = top_p * total, _MASS_MARGIN * total
    while True:
        index = race(tokens, row)
        value = tokens.values[index]
        before = np.greater(tokens.values, value, out=scratch.take("before", weights.size, np.bool_))
        np.greater_equal(tokens.values[:index], value, out=before[:index])
        mass = float(np.multiply(weights, before, out=scratch.take("screen", weights.size, np.float32)).sum())
        if mass < goal - margin or not before.any():
            return tokens.id_at(index)
        if mass <= goal + margin:
            return None
        inside = np.flatnonzero(before)
        tokens, weights = tokens.take(inside), weights[inside]


def _weights(values: Floats, row: RowContext) -> Floats:
    scaled = np.subtract(values, np.float32(row.best), out=scratch.take("weights", values.size, np.float32))
    scaled *= np.float32(1 / row.temperature)
    return np.exp(scaled, out=scaled)


def _shrink_to_nucleus(
    tokens: Tokens, weights: Floats, total: float, top_p: float, row: RowContext
) -> tuple[Tokens, Floats]:
    """Drops tokens that cannot be in the nucleus: n tokens lighter than b / n weigh less than b together.

    b is what may still be dropped: (1 - top_p) of the total, less what has been dropped already.
    """
    budget = (1 - top_p - _MASS_MARGIN) * total
    while budget > 0 and weights.size > _SMALL:
        floor = row.best + row.temperature * math.log(0.999 * budget / weights.size)
        heavy = tokens.values >= _below(floor)
        if np.count_nonzero(heavy) > weights.size // 2:
            break
        keep = np.flatnonzero(heavy)
        tokens, weights = tokens.take(keep), weights[keep]
        budget = (1 - top_p - _MASS_MARGIN) * total - (total - float(weights.sum()))
    return tokens, weights

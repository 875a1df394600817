"""What the rules of rejection sampling share: where a draft token came from, and what is left after a rejection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.types import Draft

__all__ = ["Weights", "check_laws", "excess", "normalised", "proposal_of", "ratio"]

Weights = NDArray[np.float64]

_SUM_TOLERANCE = 1e-3
"""Probabilities of a drafter that sum to less or more than 1 by this are no law; float16 rows are better."""


def check_laws(draft: Draft, laws: Weights) -> None:
    """Raises ValueError if `laws` or the draft's probabilities do not have the rows and the vocabulary they should."""
    if laws.ndim != 2 or laws.shape[0] != 1 + len(draft):
        raise ValueError(f"laws of shape {list(laws.shape)} for a draft of {len(draft)}: one row more is needed")
    rows = draft.probabilities
    if rows is not None and tuple(rows.shape) != (len(draft), laws.shape[1]):
        raise ValueError(
            f"probabilities of shape {list(rows.shape)} for a draft of {len(draft)} and laws over {laws.shape[1]} "
            "tokens: one row a draft token is needed"
        )


def proposal_of(draft: Draft, node: int, tried: Sequence[int] = ()) -> Weights | None:
    """[V] the law a draft token was drawn from after its earlier siblings were taken out; None for a point mass.

    A token without probabilities is a point mass, and so is one whose row cannot have produced it (not a law, or zero
    for this very token): any token that was not drawn with this step's noise is verified rightly as a point mass.
    """
    if draft.probabilities is None:
        return None
    law: Weights = draft.probabilities[node].detach().to("cpu", torch.float64, copy=True).numpy()
    total = float(law.sum())
    if not abs(total - 1) <= _SUM_TOLERANCE or law.min() < 0:
        return None
    if tried:
        law[list(tried)] = 0
        total = float(law.sum())
    if law[draft.ids[node]] <= 0:
        return None
    law /= total
    return law


def ratio(law: Weights, token: int, proposal: Weights | None) -> float:
    """p(token) / q(token)."""
    return float(law[token]) / (1.0 if proposal is None else float(proposal[token]))


def excess(law: Weights, token: int, proposal: Weights | None) -> Weights:
    """[V] (p - q)+, not normalised; `law` may sum to less than 1. A point mass on `token` takes all of it away."""
    if proposal is None:
        left = law.copy()
        left[token] = max(float(law[token]) - 1, 0.0)
        return left
    left = law - proposal
    return np.maximum(left, 0, out=left)


def normalised(weights: Weights, otherwise: Weights) -> Weights:
    """Weights that sum to 1; `otherwise` where rounding has left none."""
    total = float(weights.sum())
    return weights / total if total > 0 else otherwise

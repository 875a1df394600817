"""How far an engine's next-token distributions are from those of float32 on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Quality", "compare_logits"]

_ROWS = 32  # at a time: 150,000 ids in float64 are a megabyte a row


@dataclass(frozen=True)
class Quality:
    """Of teacher-forced logits, over all positions.

    Args:
        kl: mean KL(reference || engine), in nats.
        agreement: share of positions with the same most likely id.
        positions: how many.
    """

    kl: float
    agreement: float
    positions: int


def compare_logits(reference: Path, other: Path) -> Quality:
    """Compares two .npy files of [positions, vocabulary] logits; ids beyond the smaller vocabulary are left out.

    Raises:
        ValueError: they do not have the same positions, or hold values that are no numbers.
    """
    first, second = np.load(reference, mmap_mode="r"), np.load(other, mmap_mode="r")
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{reference} has {len(first)} positions, {other} {len(second)}: they must be equal, and some")
    ids = min(first.shape[1], second.shape[1])
    total, equal = 0.0, 0
    for begin in range(0, len(first), _ROWS):
        wanted = _log_softmax(first[begin : begin + _ROWS, :ids])
        found = _log_softmax(second[begin : begin + _ROWS, :ids])
        total += float((np.exp(wanted) * (wanted - found)).sum())
        equal += int((wanted.argmax(-1) == found.argmax(-1)).sum())
    if not np.isfinite(total):
        raise ValueError(f"{reference} or {other} holds logits that are no numbers")
    return Quality(total / len(first), equal / len(first), len(first))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result

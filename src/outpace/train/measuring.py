"""Acceptance of drafters in training on windows that are held out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outpace.train.acceptance import Acceptance, Tally
from outpace.train.data.packing import Windows
from outpace.train.kinds.base import Kind
from outpace.train.settings import TrainSettings
from outpace.train.target import StateSource, Target, batch_of

__all__ = ["measure", "spread"]


def measure(
    kind: Kind, target: Target, windows: Windows, states: StateSource, settings: TrainSettings, stop: Callable[[], bool]
) -> dict[str, Acceptance] | None:
    """{drafter: what the target would keep}.

    Args:
        kind: what learns.
        target: the teacher.
        windows: held out.
        states: the target's, of those windows.
        settings: how many of them are looked at, and how long chains are.
        stop: asked between two batches.

    Returns:
        None if it was to stop.
    """
    tallies: dict[str, Tally] = {}
    for which in torch.split(spread(len(windows), settings.eval_windows), settings.batch_windows):
        if stop():
            return None
        for name, chains in kind.chains(batch_of(target, windows, states, which)).items():
            tallies.setdefault(name, Tally(settings.chain)).add(chains)
    return {name: tally.result() for name, tally in tallies.items()}


def spread(count: int, most: int) -> torch.Tensor:
    """At most `most` of the numbers 0 .. count - 1, at even distances: windows come in the order of their sources."""
    chosen = torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device="cpu")
    return chosen.round().long()

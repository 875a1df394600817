"""Whether a new head is accepted more often than the one it began as: both on the same held-out windows, one by one.

Two heads differ less than two windows do, so what counts is what each window says of both. A gain is believed if it is
large against how much the windows disagree about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from outpace.train.acceptance import Acceptance, Tally
from outpace.train.data.packing import Windows
from outpace.train.kinds.base import Kind
from outpace.train.measuring import spread
from outpace.train.target import StateSource, Target, batch_of

__all__ = ["Comparison", "Judged", "compare", "judge"]

_MOST_WINDOWS = 200
_FEWEST_WINDOWS = 4
"""With fewer, nobody can tell how much windows disagree."""
_WORTH = 0.005
"""Share of the old score that a gain has to be, however sure it is: less is not worth a change."""
_SURE = 2.0
"""Times its standard error."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A head on some windows.

    Args:
        acceptance: over all of them.
        scores: [windows] of each, tokens a step brings at temperature 0 and at 1, together.
    """

    acceptance: Acceptance
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two heads on the same windows.

    Args:
        old: of the head that training began as.
        new: of the one that came of it.
        gain: by which the new one's score is higher, the mean over windows.
        doubt: standard error of that; infinite where there are too few windows to tell.
        windows: how many there were.
    """

    old: Acceptance
    new: Acceptance
    gain: float
    doubt: float
    windows: int

    @property
    def is_better(self) -> bool:
        """Whether the gain is worth a change, and no chance."""
        old = self.old.greedy_length + self.old.sampled_length
        return self.gain > max(_WORTH * old, _SURE * self.doubt)

    def describe(self) -> str:
        """Both, for people."""
        old, new = self.old, self.new
        sure = "too few to tell" if math.isinf(self.doubt) else f"together {self.gain:+.3f} +- {self.doubt:.3f}"
        return (
            f"mean acceptance length {new.greedy_length:.3f} at temperature 0 and {new.sampled_length:.3f} at 1; the "
            f"head it began as had {old.greedy_length:.3f} and {old.sampled_length:.3f}, on the same {self.windows} "
            f"held-out windows ({sure})"
        )


def judge(
    kind: Kind, target: Target, windows: Windows, states: StateSource, chain: int, report: Callable[[int, int], None]
) -> Judged:
    """Measures a kind with one drafter as it is.

    Args:
        kind: with the weights to be judged.
        target: the teacher.
        windows: all that are held out; at most 200 of them are looked at.
        states: the target's, of those windows.
        chain: draft length.
        report: takes (windows done, windows in all).
    """
    whole, scores = Tally(chain), []
    chosen = spread(len(windows), _MOST_WINDOWS)
    for done, which in enumerate(torch.split(chosen, 1), 1):
        [chains] = kind.chains(batch_of(target, windows, states, which)).values()
        own = Tally(chain)
        for tally in (whole, own):
            tally.add(chains)
        found = own.result()
        scores.append(found.greedy_length + found.sampled_length)
        report(done, len(chosen))
    return Judged(whole.result(), tuple(scores))


def compare(old: Judged, new: Judged) -> Comparison:
    """Two heads that were judged on the same windows."""
    differences = [after - before for before, after in zip(old.scores, new.scores, strict=True)]
    count = len(differences)
    doubt = stdev(differences) / math.sqrt(count) if count >= _FEWEST_WINDOWS else math.inf
    return Comparison(old.acceptance, new.acceptance, fmean(differences), doubt, count)

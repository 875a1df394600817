"""Whether a new head is accepted more often than the one it began as: both on the same held-out texts, one by one.

The texts are none that the new one was chosen on among the states of its run: there it looks better than it is.
Two heads differ less than two texts do, so what counts is what each text says of both. A gain is believed if it is
large against how much the texts disagree about it. A longer text has more to say, and counts for as much more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outpace.train.acceptance import Acceptance, Chains, Tally, texts_of
from outpace.train.data.packing import Windows
from outpace.train.kinds.base import Kind
from outpace.train.measuring import spread
from outpace.train.target import StateSource, Target, batch_of

__all__ = ["Comparison", "Judged", "compare", "judge"]

_MOST_WINDOWS = 200
_FEWEST_TEXTS = 4
"""With fewer, nobody can tell how much texts disagree."""
_WORTH = 0.005
"""Share of the old score that a gain has to be, however sure it is: less is not worth a change."""
_SURE = 2.0
"""Times its standard error."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A head on some texts.

    Args:
        acceptance: over all of them.
        scores: [texts] of each, tokens a step brings at temperature 0 and at 1, together.
        rows: [texts] chains looked at in each.
    """

    acceptance: Acceptance
    scores: tuple[float, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two heads on the same texts.

    Args:
        old: of the head that training began as.
        new: of the one that came of it.
        gain: by which the new one's score is higher, the mean over texts by their length.
        doubt: standard error of that; infinite where there are too few texts to tell.
        texts: how many there were.
    """

    old: Acceptance
    new: Acceptance
    gain: float
    doubt: float
    texts: int

    @property
    def is_better(self) -> bool:
        """Whether the gain is worth a change, and no chance."""
        old = self.old.greedy_length + self.old.sampled_length
        return self.gain > max(_WORTH * old, _SURE * self.doubt)

    def describe(self) -> str:
        """Both, for people."""
        old, new = self.old, self.new
        enough = f"{_FEWEST_TEXTS} are needed: train with more answers, or a larger --validation"
        if not self.texts:
            return f"no text was held out to judge by, {enough}"
        sure = f"together {self.gain:+.3f} +- {self.doubt:.3f}"
        if math.isinf(self.doubt):
            sure = f"too few to tell, {enough}"
        return (
            f"mean acceptance length {new.greedy_length:.3f} at temperature 0 and {new.sampled_length:.3f} at 1; the "
            f"head it began as had {old.greedy_length:.3f} and {old.sampled_length:.3f}, on the same {self.texts} "
            f"held-out texts ({sure})"
        )


def judge(
    kind: Kind,
    target: Target,
    windows: Windows,
    states: StateSource,
    which: torch.Tensor,
    chain: int,
    report: Callable[[int, int], None],
) -> Judged:
    """Measures a kind with one drafter as it is.

    Args:
        kind: with the weights to be judged.
        target: the teacher.
        windows: all that are held out.
        states: the target's, of those windows.
        which: [n] int64 numbers of the windows to judge on; at most 200 of them are looked at.
        chain: draft length.
        report: takes (windows done, windows in all).
    """
    whole, scores, rows = Tally(chain), [], []
    chosen = which[spread(len(which), _MOST_WINDOWS)]
    for done, number in enumerate(chosen.unsqueeze(1), 1):
        [chains] = kind.chains(batch_of(target, windows, states, number)).values()
        whole.add(chains)
        for begin, end in texts_of(chains.follows):
            here = slice(begin, end)
            own = Tally(chain)
            own.add(Chains(chains.agrees[here], chains.alpha[here], chains.exists[here], chains.follows[here]))
            found = own.result()
            scores.append(found.greedy_length + found.sampled_length)
            rows.append(end - begin)
        report(done, len(chosen))
    return Judged(whole.result(), tuple(scores), tuple(rows))


def compare(old: Judged, new: Judged) -> Comparison:
    """Two heads that were judged on the same texts."""
    assert old.rows == new.rows, "the same texts"
    differences = [after - before for before, after in zip(old.scores, new.scores, strict=True)]
    count, total = len(differences), sum(old.rows)
    if not total:
        return Comparison(old.acceptance, new.acceptance, 0.0, math.inf, 0)
    gain = sum(weight * each for weight, each in zip(old.rows, differences, strict=True)) / total
    doubt = math.inf
    if count >= _FEWEST_TEXTS:
        squares = sum((weight * (each - gain)) ** 2 for weight, each in zip(old.rows, differences, strict=True))
        doubt = math.sqrt(squares * count / (count - 1)) / total
    return Comparison(old.acceptance, new.acceptance, gain, doubt, count)

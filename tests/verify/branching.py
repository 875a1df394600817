"""The exact law of a rule that runs: every decision is answered in every way it can be, and the chances multiplied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.sampling.choose import NO_TOKEN
from outpace.types import Draft, Purpose, Verdict
from outpace.verify.noise import Chance

Rule = Callable[[Draft, NDArray[np.float64], Chance], Verdict]


@dataclass
class Branching:
    """Answers by a script, then in the first possible way; remembers the other ways."""

    script: tuple[int, ...]
    taken: tuple[int, ...] = ()
    chance: float = 1.0
    others: list[tuple[int, ...]] = field(default_factory=list)

    def accepts(self, chance: float, depth: int, token: int) -> bool:
        assert not np.isnan(chance)
        yes = min(max(chance, 0.0), 1.0)
        return bool(self._answer({1: yes, 0: 1 - yes}))

    def draw(self, weights: NDArray[np.float64], depth: int, purpose: Purpose) -> int:
        total = weights.sum()
        assert (weights >= 0).all()
        if not total:
            return NO_TOKEN
        return self._answer({token: weight / total for token, weight in enumerate(weights)})

    def _answer(self, chances: dict[int, float]) -> int:
        ways = [answer for answer, chance in chances.items() if chance > 0]
        if len(self.taken) < len(self.script):
            answer = self.script[len(self.taken)]
        else:
            answer = ways[0]
            self.others += [(*self.taken, other) for other in ways[1:]]
        self.taken += (answer,)
        self.chance *= chances[answer]
        return answer


def outcomes(rule: Rule, draft: Draft, laws: NDArray[np.float64]) -> dict[Verdict, float]:
    """The chance of every verdict that can happen."""
    found: defaultdict[Verdict, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        run = Branching(scripts.pop())
        found[rule(draft, laws, run)] += run.chance
        scripts += run.others
    return dict(found)

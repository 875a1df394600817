"""The decisions that rejection sampling leaves to chance, as a pure function of (seed, choice number, step, place).

A rule asks for two things only: "does an event of this chance happen?" and "draw a token from these weights". So the
exact law of a rule can be computed by answering both ways, and nothing in a rule can draw noise behind its back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outpace.sampling.choose import NO_TOKEN
from outpace.sampling.noise import noise_key, uniform
from outpace.types import Purpose

__all__ = ["Chance", "StepNoise"]


class Chance(Protocol):
    """What decides for a rule. `depth` counts positions from the first token of the step."""

    def accepts(self, chance: float, depth: int, token: int) -> bool:
        """True with probability `chance` (0 or less: never, 1 or more: always)."""
        ...

    def draw(self, weights: NDArray[np.float64], depth: int, purpose: Purpose) -> int:
        """A token with probability proportional to its weight, [V], not negative; NO_TOKEN if all are zero."""
        ...


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Decisions of one step of one request; the same step asked again decides the same.

    Args:
        seed: the request's seed.
        number: which of its n choices.
        origin: position of the step's first token. It is part of every key, because what was drawn for positions that
            a step then gives up says something about why it gave them up (see `Choice.origin`).
    """

    seed: int
    number: int
    origin: int

    def accepts(self, chance: float, depth: int, token: int) -> bool:
        """Compares the token's own noise at its position with the chance."""
        return self._uniform(depth, Purpose.ACCEPT, token) < chance

    def draw(self, weights: NDArray[np.float64], depth: int, purpose: Purpose) -> int:
        """Inverts the cumulative sum at one uniform number of 52 bits: one pass, off by 2**-52 of the total at most."""
        support = np.flatnonzero(weights)
        if not support.size:
            return NO_TOKEN
        mass = np.cumsum(weights[support])
        index = int(np.searchsorted(mass, self._uniform(depth, purpose, 0) * mass[-1], side="right"))
        return int(support[min(index, support.size - 1)])

    def _uniform(self, depth: int, purpose: Purpose, token: int) -> float:
        return uniform(noise_key(self.seed, self.number, self.origin + depth, purpose, self.origin), token)

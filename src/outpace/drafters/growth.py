"""A draft while it grows token by token, for drafters that draw from a model's logits.

Under the coupled rule a token is drawn with the noise the target will use at its position (Daliri, Musco, Suresh, arXiv
2408.07978), so that where the two distributions agree, so do the tokens. Under the others it is drawn with noise of its
own, and the law it was drawn from goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.sampling.choose import NO_TOKEN, choose_each
from outpace.sampling.law import law_rows
from outpace.types import Ask, Draft, Resume

__all__ = ["Growth", "extend"]


@dataclass(slots=True, kw_only=True)
class Growth:
    """One request's draft.

    Args:
        ask: what it is made for.
        ids: draft tokens so far.
        laws: [V] the law of each of them, float64; none under the coupled rule.
    """

    ask: Ask
    ids: list[int] = field(default_factory=list)
    laws: list[NDArray[np.float64]] = field(default_factory=list)

    def draft(self, source: str, resume: Resume | None = None) -> Draft:
        """The finished chain; empty if no token was drawn."""
        if not self.ids:
            return Draft()
        probabilities = None if self.ask.coupled else torch.from_numpy(np.stack(self.laws))
        return Draft.chain(self.ids, source, probabilities=probabilities, resume=resume)


_Growth = TypeVar("_Growth", bound=Growth)


def extend(growths: Sequence[_Growth], logits: torch.Tensor) -> list[_Growth]:
    """Draws the next token of every draft from its row of logits [len(growths), V].

    Returns:
        Those that got one. A row that allows no choice ends its own draft only; what was drawn before still counts.
    """
    choices = [growth.ask.choice(growth.ids) for growth in growths]
    tokens = choose_each(logits, choices).tokens
    drawn = [row for row, token in enumerate(tokens) if token != NO_TOKEN]
    own = [row for row in drawn if not growths[row].ask.coupled]
    laws = law_rows(logits[own], [choices[row] for row in own]).rows if own else ()
    for row, law in zip(own, laws, strict=True):
        growths[row].laws.append(law)
    for row in drawn:
        growths[row].ids.append(tokens[row])
    return [growths[row] for row in drawn]

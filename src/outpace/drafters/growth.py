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
        confidence: the probability its own model gives each of them, before temperature and filters.
        survival: the chance that all of them are kept, as far as the one who asks can tell; 1 if nobody wants to know.
    """

    ask: Ask
    ids: list[int] = field(default_factory=list)
    laws: list[NDArray[np.float64]] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    survival: float = 1.0

    @property
    def is_worth_more(self) -> bool:
        """Whether another token can pay."""
        return self.survival >= self.ask.stop_below and not (self.ids and self.ids[-1] in self.ask.stop_ids)

    def push(self, token: int, confidence: float) -> None:
        """Adds a token."""
        if self.ask.chance is not None:
            self.survival *= self.ask.chance(len(self.ids), confidence, ())
        self.ids.append(token)
        self.confidence.append(confidence)

    def draft(self, source: str, resume: Resume | None = None) -> Draft:
        """The finished chain; empty if no token was drawn."""
        if not self.ids:
            return Draft()
        probabilities = None if self.ask.coupled else torch.from_numpy(np.stack(self.laws))
        return Draft.chain(self.ids, source, probabilities=probabilities, confidence=self.confidence, resume=resume)


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
    for row, confidence in zip(drawn, _probabilities(logits, drawn, tokens), strict=True):
        growths[row].push(tokens[row], confidence)
    return [growths[row] for row in drawn]


def _probabilities(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What the model itself gives the tokens drawn at these rows of logits [R, V]."""
    if not rows:
        return []
    wanted = logits if len(rows) == logits.shape[0] else logits[list(rows)]
    ids = torch.tensor([[tokens[row]] for row in rows], dtype=torch.int64, device="cpu")
    picked = wanted.gather(1, ids)[:, 0]
    found: list[float] = (picked - wanted.logsumexp(dim=1)).exp().tolist()
    return found

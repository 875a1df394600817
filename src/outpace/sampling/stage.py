"""What the rules of a request have in common: each is a stage that changes the logits of one row in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "Floats", "History", "Stage"]

Floats = NDArray[np.float32]

NEVER = np.float32(-np.inf)
"""The logit of a token that must not be chosen."""


@dataclass(frozen=True, slots=True)
class History:
    """The text before one row. A token counts the same whether it is committed or still a draft.

    Args:
        prompt: prompt token ids.
        committed: output token ids that are certain.
        path: draft token ids behind them.
    """

    prompt: Sequence[int]
    committed: Sequence[int]
    path: Sequence[int]

    @property
    def num_output_tokens(self) -> int:
        return len(self.committed) + len(self.path)

    @property
    def position(self) -> int:
        """Absolute position of the token that is chosen from the row."""
        return len(self.prompt) + self.num_output_tokens

    def output(self) -> list[int]:
        """A fresh list of all output token ids."""
        return [*self.committed, *self.path]

    def output_tail(self, count: int) -> list[int]:
        """The last `count` output token ids (at least 1), or all there are."""
        return [*self.committed[-count:], *self.path][-count:]


class Stage(Protocol):
    """One rule."""

    @property
    def name(self) -> str:
        """The parameters behind it, for messages."""
        ...

    def apply(self, values: Floats, history: History) -> None:
        """Changes the [V] logits of the row after `history` in place.

        Raises:
            OutpaceError: the rule is the caller's own code and failed.
        """
        ...

"""How one request is drafted for, settled when it is prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DraftPlan"]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Which drafters may draft for a request, and how much; by default none, which is plain decoding.

    Args:
        free: the drafter that only looks things up, and is therefore always asked first; None if there is none.
        computing: drafters that run rows of a model, in order of preference.
        most: {drafter: most draft tokens a step} of all of them, each at least 1.
        widths: {drafter: most continuations of a token} of those whose drafts may branch.
        verification: the rule its drafts are verified by: "coupled", "standard" or "block".
    """

    free: str | None = None
    computing: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    verification: str = "coupled"

    @property
    def drafters(self) -> tuple[str, ...]:
        """All of them."""
        return self.computing if self.free is None else (self.free, *self.computing)

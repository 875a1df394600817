"""What came of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outpace.train.acceptance import Acceptance
from outpace.train.report import Speed

__all__ = ["Ending", "Outcome"]


class Ending(Enum):
    """Why a run ended; the value is for people."""

    DONE = "all steps are done"
    EARLY = "no improvement any more"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Args:
        ending: why it ended.
        step: steps done over all sessions.
        first: acceptance before the first step, by drafter.
        best: acceptance of what was saved, by drafter.
        best_steps: after how many steps that was.
        served: how to serve it: {drafter: speculative config as JSON}.
        speed: of this session.
        better: whether what was saved is better than the head it began as; None if it began as none, or was
            interrupted.
    """

    ending: Ending
    step: int
    first: dict[str, Acceptance]
    best: dict[str, Acceptance]
    best_steps: dict[str, int]
    served: dict[str, str]
    speed: Speed
    better: bool | None = None

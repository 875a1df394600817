"""What is remembered of each request: made when it is first seen, gone when it is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.control.acceptance import Correction
from outpace.control.probing import Pace
from outpace.control.silence import Silence
from outpace.control.widths import BranchGain

__all__ = ["RequestState", "Requests"]

_MOST_REQUESTS = 4096  # beyond, the oldest are forgotten: nobody keeps so many running


@dataclass(slots=True)
class RequestState:
    """One request.

    Args:
        num_tokens: that came so far.
        num_steps: in which they came.
        plain_seconds: plain steps would have taken for the tokens of the last steps; see `floor`.
        seconds: that these steps took.
        corrections: by drafter.
        paces: by drafter, when it is tried next if it does not seem to pay.
        branches: by drafter, what they bring.
        silences: by drafter that once found nothing when it was asked.
    """

    num_tokens: int = 0
    num_steps: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    corrections: dict[str, Correction] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    branches: dict[str, BranchGain] = field(default_factory=dict)
    silences: dict[str, Silence] = field(default_factory=dict)

    def correction(self, drafter: str, make: Callable[[], Correction]) -> Correction:
        found = self.corrections.get(drafter)
        if found is None:
            found = self.corrections[drafter] = make()
        return found

    def branches_of(self, drafter: str) -> BranchGain:
        found = self.branches.get(drafter)
        if found is None:
            found = self.branches[drafter] = BranchGain()
        return found

    def pace(self, drafter: str, interval: float, now: int) -> Pace:
        found = self.paces.get(drafter)
        if found is None:
            found = self.paces[drafter] = Pace(interval, now)
        return found


class Requests:
    """Their states by id.

    Attributes:
        running: those that decoded in the last step.
    """

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self.running: set[int] = set()

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: int) -> RequestState:
        found = self._states.get(request_id)
        if found is None:
            if len(self._states) >= _MOST_REQUESTS:
                del self._states[next(iter(self._states))]
            found = self._states[request_id] = RequestState()
        return found

    def __setitem__(self, request_id: int, state: RequestState) -> None:
        self._states[request_id] = state

    def known_correction(self, request_id: int, drafter: str) -> Correction | None:
        """None if it has none yet."""
        state = self._states.get(request_id)
        return None if state is None else state.corrections.get(drafter)

    def forget(self, drafter: str) -> None:
        """Nobody remembers anything of a drafter."""
        for state in self._states.values():
            state.corrections.pop(drafter, None)
            state.paces.pop(drafter, None)
            state.branches.pop(drafter, None)
            state.silences.pop(drafter, None)

    def release(self, request_id: int) -> None:
        self._states.pop(request_id, None)
        self.running.discard(request_id)

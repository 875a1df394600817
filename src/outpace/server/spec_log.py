"""The line about speculation in the log, word for word as vLLM writes it: people have scripts that read it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outpace.async_llm import Load, StepReport
from outpace.engine.outputs import DraftCounts

__all__ = ["INTERVAL", "SpecLogger"]

log = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds from one line to the next while there is work."""
_LINE = (
    "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
    "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
    "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%"
)


class SpecLogger:
    """Writes a line for every 10 seconds of steps, and nothing where there were no drafts.

    A window opens with a step. It closes after 10 seconds, or, if the last line is that old, as soon as there is no
    more work, so that a single short request is heard of too. A pause that outlasts the window is no part of it.

    Args:
        positions: rates that a line shows at least, 0 for those never drafted.
        clock: seconds, never going back.
    """

    def __init__(self, positions: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._positions = positions
        self._clock = clock
        self._opened: float | None = None
        self._last_step = self._last_line = float("-inf")
        self._stats = self._fresh()

    def observe(self, step: StepReport) -> None:
        """Counts a step. A listener for `AsyncLLM.on_step`."""
        now = self._clock()
        if self._opened is not None and now - step.seconds - self._opened >= INTERVAL:
            self._close()
        if step.seconds:
            self._last_step = now
            if self._opened is None:
                self._opened = now - step.seconds
        for _, num_draft_tokens, num_accepted in step.drafts:
            self._stats.count_draft(num_draft_tokens, num_accepted)
        if self._opened is None:
            return
        if now - self._opened >= INTERVAL or (_is_idle(step.load) and now - self._last_line >= INTERVAL):
            self._close()

    def _close(self) -> None:
        """Ends the window, with a line if there were drafts. The next one opens with the next step."""
        assert self._opened is not None
        if self._stats.drafts:
            self._write(self._stats, self._last_step - self._opened)
            self._last_line = self._last_step
            self._stats = self._fresh()
        self._opened = None

    def _write(self, stats: DraftCounts, seconds: float) -> None:
        log.info(
            _LINE,
            stats.mean_acceptance_length,
            stats.accepted_tokens / seconds if seconds > 0 else 0.0,
            stats.draft_tokens / seconds if seconds > 0 else 0.0,
            stats.accepted_tokens,
            stats.draft_tokens,
            ", ".join(f"{rate:.3f}" for rate in stats.per_position or ()),
            100 * (stats.acceptance_rate or 0.0),
        )

    def _fresh(self) -> DraftCounts:
        return DraftCounts(accepted_at=[0] * self._positions)


def _is_idle(load: Load) -> bool:
    return load.running == load.waiting == 0

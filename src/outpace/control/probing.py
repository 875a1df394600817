"""What seems not to pay is tried again now and then, and what that may cost.

The budget grows by a small share of the seconds that pass and is charged with the price of every probe, so probing
never takes more than that share. How often one thing is tried is up to it: less often after every failure, soon again
after a success.
"""

from __future__ import annotations

__all__ = ["Pace", "ProbingBudget"]

SHARE = 0.015
"""Of the time, for probing."""

_MOST_STEPS = 20.0  # the budget is no larger than this many plain steps, so that probes do not come in crowds
_SHORTEST, _LONGEST, _LONGER = 2.0, 32.0, 1.25  # steps between two probes, and how they grow with a failure


class ProbingBudget:
    """Seconds that may be spent on probes.

    Attributes:
        seconds: that may be spent now.
        spent: so far.
        debt: what drafts that were no probes have lost against plain decoding, as it really came. It is paid back from
            the budget first, so that bad luck and probing together stay within the share.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.spent = 0.0
        self.debt = 0.0

    def earn(self, seconds: float, plain_step: float) -> None:
        """`seconds` have passed, in which a plain step takes `plain_step`."""
        earned = SHARE * seconds
        paid = min(earned, self.debt)
        self.debt -= paid
        self.seconds = min(self.seconds + earned - paid, max(self.seconds, _MOST_STEPS * plain_step))

    def lose(self, seconds: float, plain_step: float) -> None:
        """A step with drafts lost that much against plain steps; negative if it won."""
        self.debt = min(max(0.0, self.debt + seconds), _MOST_STEPS * plain_step)

    def affords(self, price: float) -> bool:
        return price + self.debt <= self.seconds

    def charge(self, price: float) -> None:
        """A probe of this price, 0 or more, is made. Where it has to be made, more than there is need not be there."""
        self.seconds = max(0.0, self.seconds - price)
        self.spent += price


class Pace:
    """When something is due again, in steps.

    Args:
        interval: steps until the first time.
        now: the step.
        longest: most steps between two times.
    """

    __slots__ = ("due", "interval", "longest")

    def __init__(self, interval: float, now: int, longest: float = _LONGEST) -> None:
        self.interval = interval
        self.longest = longest
        self.due = now + interval

    def tried(self, now: int, success: bool) -> None:
        """It was tried at step `now`."""
        self.interval = _SHORTEST if success else min(_LONGER * self.interval, self.longest)
        self.due = now + (1 if success else self.interval)

    def hasten(self, now: int) -> None:
        """Something at step `now` says that it may be worth more than it was."""
        self.interval = max(_SHORTEST, 0.5 * self.interval)
        self.due = min(self.due, now + self.interval)

    def restart(self, now: int) -> None:
        """It happened anyway at step `now`."""
        self.interval = _SHORTEST
        self.due = now + _SHORTEST

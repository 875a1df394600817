"""Whether looking drafts up is worth its own time: some hundred microseconds a step, for every request anew.

Where next to nothing is gained, in large batches above all, that is more than the gain. Lookups then rest for a step,
then for two, four, eight, and are tried again in between; once a try brings more than it cost they go on. What begins
to repeat is noticed as much later, so nobody rests longer than it takes to bring the price down to a percent.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Resting"]

_LONGEST = 8
"""Steps without lookups between two tries."""
_BEARABLE = 0.01
"""Of a plain step, that lookups may take for nothing."""
_FADE = 1.0 / 8.0
"""Weight of a step with lookups against the ones before it."""
_FIRST = 8
"""Steps with lookups before anything is believed."""


@dataclass(slots=True)
class _Account:
    """Of batches of about one size.

    Args:
        gain: seconds that a step with lookups wins over a plain one, on average.
        price: seconds of looking up.
        num_steps: with lookups.
        interval: steps of the last rest.
        left: steps of the rest that is going on.
    """

    gain: float = 0.0
    price: float = 0.0
    num_steps: int = 0
    interval: int = 0
    left: int = 0


class Resting:
    """One account for every size of batches: what does not pay for sixteen may pay for the last two of them."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._last = _Account()

    def reason(self) -> str | None:
        """Why lookups rest in batches of the present size; None where they do not."""
        if not self._last.interval:
            return None
        gain, price = 1e3 * self._last.gain, 1e3 * self._last.price
        return f"rests, since a step won {gain:.1f} ms by it lately, and looking up took {price:.1f} ms"

    def rests(self, decoding: int) -> bool:
        """Whether this step, of so many decoding requests, does without; asked once a step."""
        account = self._of(decoding)
        if not account.left:
            return False
        account.left -= 1
        return True

    def observe(self, decoding: int, gain: float, price: float, plain: float) -> None:
        """A step with lookups.

        Args:
            decoding: requests.
            gain: seconds that plain steps would have taken for what was kept, less those of verifying it.
            price: seconds of looking up.
            plain: seconds of a plain step.
        """
        account = self._of(decoding)
        account.num_steps += 1
        weight = max(_FADE, 1.0 / account.num_steps)
        account.gain += weight * (gain - account.gain)
        account.price += weight * (price - account.price)
        if account.num_steps < _FIRST or account.gain >= account.price:
            account.interval = 0
        elif gain > price:
            account.interval = 1
        else:
            account.interval = max(1, 2 * account.interval)
        account.interval = min(account.interval, _LONGEST, int(account.price / (_BEARABLE * plain)))
        account.left = account.interval

    def _of(self, decoding: int) -> _Account:
        """1, 2 to 3, 4 to 7, 8 to 15, ... requests."""
        size = decoding.bit_length()
        found = self._accounts.get(size)
        if found is None:
            found = self._accounts[size] = _Account()
        self._last = found
        return found

"""Counts of what drafts brought and cost, and the sentence that says why a drafter is off."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.decisions import DrafterReport

__all__ = ["Prospect", "Tally"]

_LATELY = 32
"""Steps after which what a drafter promised is no reason any more: nobody could have asked it since."""


@dataclass(slots=True)
class Prospect:
    """The best that a drafter promised when it was not asked, or its draft was dropped.

    Args:
        num_tokens: of the draft or drafts.
        kept: of these, as many are expected to be kept.
        verifying: seconds that verifying them would add.
        drafting: seconds of drafting them.
        ratio: tokens per second over those without it.
        held: it would have paid, but another request could not bear it (`floor`).
    """

    num_tokens: int
    kept: float
    verifying: float
    drafting: float
    ratio: float
    held: bool = False

    def sentence(self, drafter: str) -> str:
        price = f"{1e3 * self.verifying:.1f} ms of verifying"
        if self.drafting:
            price = f"{1e3 * self.drafting:.1f} ms of drafting and {price}"
        tokens = f"{self.num_tokens} draft token{'s' * (self.num_tokens != 1)}"
        expected = f"{self.kept:.1f} of {tokens} expected to be kept"
        why = ", but a request that gains nothing would become slower" if self.held else ""
        return f"{drafter}: {expected} for {price}, {self.ratio:.2f}x the speed without{why}"


@dataclass(slots=True)
class Tally:
    """One drafter's counts. `used` ones are of the steps that verified a draft of it."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    expected: float = 0.0
    drafting: float = 0.0
    verifying: float = 0.0
    used_tokens: float = 0.0
    used_expected: float = 0.0
    used_seconds: float = 0.0
    used_plain_tokens: float = 0.0
    used_plain_seconds: float = 0.0
    used_expected_seconds: float = 0.0
    prospect: Prospect | None = field(default=None)
    noted: int = 0

    def report(self, drafter: str, now: int = 0) -> DrafterReport:
        """Of a drafter, in step `now`; `noted` is the step in which its prospect was."""
        off = self.prospect if now <= self.noted + _LATELY else None
        return DrafterReport(
            drafter=drafter,
            drafts=self.drafts,
            tokens=self.tokens,
            expected_accepted=self.expected,
            accepted=self.accepted,
            drafting_seconds=self.drafting,
            verifying_seconds=self.verifying,
            expected_gain=self._gain(self.used_expected, self.used_expected_seconds),
            gain=self._gain(self.used_tokens, self.used_seconds),
            off=None if off is None else off.sentence(drafter),
        )

    def _gain(self, tokens: float, seconds: float) -> float | None:
        if not seconds or not self.used_plain_seconds:
            return None
        return (tokens / seconds) / (self.used_plain_tokens / self.used_plain_seconds)

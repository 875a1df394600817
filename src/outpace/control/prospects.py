"""What drafts promised that were not made, or not verified: the numbers of the sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.control.allocation import Plan
from outpace.control.report import Prospect
from outpace.decisions import Offer

__all__ = ["of_lookups"]


def of_lookups(
    chosen: Plan, offers: Sequence[Offer | None], survivals: Sequence[Sequence[float]]
) -> dict[str, Prospect]:
    """By drafter whose drafts were at hand: the best plan with drafts, where the chosen one has none.

    Tokens are counted here, not what they are worth beside those of other requests; the ratio is what decided.

    Args:
        chosen: the plan.
        offers: the drafts, one a wish.
        survivals: chances of their tokens.
    """
    plan = chosen.second_best
    if plan is None or any(chosen.counts):
        return {}
    counts: dict[str, int] = {}
    kept: dict[str, float] = {}
    for offer, survival, count in zip(offers, survivals, plan.counts, strict=True):
        if offer is not None and count:
            counts[offer.drafter] = counts.get(offer.drafter, 0) + count
            kept[offer.drafter] = kept.get(offer.drafter, 0.0) + sum(survival[:count])
    each = (plan.seconds - chosen.seconds) / sum(plan.counts)
    ratio = plan.rate / chosen.rate
    return {name: Prospect(count, kept[name], each * count, 0.0, ratio, chosen.held) for name, count in counts.items()}

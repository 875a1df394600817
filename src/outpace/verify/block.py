"""Block verification: the draft is judged as a whole, which accepts at least as many tokens as judging one by one.

Sun et al. arXiv 2403.10444. With P_0 = 1 and P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), the first i tokens of a draft
of k qualify with chance

    h_k = P_k,    h_i = A_i / (A_i + 1 - P_i),    A_i = sum over x of (P_i p_{i+1}(x) - q_{i+1}(x))+    (0 < i < k)

each by a number of its own, and the longest prefix that qualifies is accepted. After all k the bonus token follows p,
after fewer the normalised (P_i p_{i+1} - q_{i+1})+. The text follows the target's law exactly, but which text comes
depends on the draft.
"""

from __future__ import annotations

from outpace.types import Draft, Purpose, Verdict
from outpace.verify.noise import Chance
from outpace.verify.rejection import Weights, check_laws, excess, normalised, proposal_of, ratio

__all__ = ["verify"]


def verify(draft: Draft, laws: Weights, noise: Chance) -> Verdict:
    """Looks for the longest prefix that qualifies, from the whole draft down.

    Args:
        draft: a clean chain.
        laws: [1 + n, V] the target's law after the last committed token, then after each draft token; a row of zeros
            where it allows no choice: the draft counts as ending there.
        noise: decides.

    Returns:
        The accepted prefix and the bonus token, NO_TOKEN where the law allows no choice.

    Raises:
        ValueError: the shapes do not fit each other, or the draft is a tree.
    """
    check_laws(draft, laws)
    if draft.parents != tuple(range(-1, len(draft) - 1)):
        raise ValueError(
            f"block verification takes chains, and the parents of this draft are {list(draft.parents)}: "
            "cut it with principal_chain first, or use the standard or the coupled rule"
        )
    length = next((i for i in range(len(draft)) if not laws[i].any()), len(draft))
    proposals = [proposal_of(draft, i) for i in range(length)]
    clipped = [1.0]
    for i in range(length):
        clipped.append(min(1.0, clipped[i] * ratio(laws[i], draft.ids[i], proposals[i])))
    if not length or noise.accepts(clipped[length], length - 1, draft.ids[length - 1]):
        return Verdict(tuple(range(length)), noise.draw(laws[length], length, Purpose.BONUS))
    for i in range(length - 1, -1, -1):
        if not clipped[i]:  # h_i = 0
            continue
        left = excess(clipped[i] * laws[i], draft.ids[i], proposals[i])
        if not i or noise.accepts(_chance(float(left.sum()), clipped[i]), i - 1, draft.ids[i - 1]):
            break
    return Verdict(tuple(range(i)), noise.draw(normalised(left, laws[i]), i, Purpose.RESIDUAL))


def _chance(area: float, clipped: float) -> float:
    """h_i. Where P_i = 1 and p = q behind it (0 / 0) a longer prefix qualifies for certain, so any value would do."""
    return area / (area + 1 - clipped) if area > 0 or clipped < 1 else 1.0

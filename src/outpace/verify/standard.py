"""The standard rule of speculative sampling: each draft token is accepted with chance min(1, p / q).

Leviathan et al. arXiv 2211.17192, Chen et al. arXiv 2302.01318; for trees siblings are tried in order, drawn without
replacement (Jeon et al. arXiv 2402.14160, Chen et al. arXiv 2402.12374). The text follows the target's law exactly, but
which text comes depends on the draft.
"""

from __future__ import annotations

from collections import defaultdict

from outpace.types import Draft, Purpose, Verdict
from outpace.verify.noise import Chance
from outpace.verify.rejection import Weights, check_laws, excess, normalised, proposal_of, ratio

__all__ = ["verify"]


def verify(draft: Draft, laws: Weights, noise: Chance) -> Verdict:
    """Walks down from the last committed token as long as a child is accepted.

    A rejected child leaves p <- norm((p - q)+) to its siblings and takes its token out of their q. The bonus token is
    drawn from what p has become at the node where the walk ends: p itself if no child was rejected there. Without a
    draft this is plain decoding.

    Args:
        draft: a clean draft, chain or tree. Siblings with probabilities were drawn one after the other from one law
            without replacement, which is the row of each of them; without probabilities they are point masses.
        laws: [1 + n, V] the target's law after the last committed token, then after each node; a row of zeros where it
            allows no choice, which counts only if the walk ends there.
        noise: decides.

    Returns:
        The accepted path and the bonus token, NO_TOKEN where the law allows no choice.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    check_laws(draft, laws)
    children: defaultdict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(draft.parents):
        children[parent].append(node)
    path: list[int] = []
    node = -1
    while True:
        depth, law = len(path), laws[1 + node]
        tried: list[int] = []
        for child in children[node]:
            token = draft.ids[child]
            proposal = proposal_of(draft, child, tried)
            if noise.accepts(ratio(law, token, proposal), depth, token):
                break
            law = normalised(excess(law, token, proposal), law)
            tried.append(token)
        else:
            return Verdict(tuple(path), noise.draw(law, depth, Purpose.RESIDUAL if tried else Purpose.BONUS))
        path.append(child)
        node = child

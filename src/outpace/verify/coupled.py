"""The coupled rule: the draft is kept as far as it says what the target chooses anyway.

The target's token at every node is a pure function of that node's own history, so verification only compares integers.
It is the same for chains and trees, greedy and sampled (Daliri, Musco, Suresh, arXiv 2408.07978, with noise shared by
position).
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.types import Draft, Verdict

__all__ = ["verify"]


def verify(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Walks from the last committed token to the first node where no child carries the target's token.

    Args:
        draft: a clean draft (see `clean_draft`); of siblings with the same token the first counts.
        chosen: [1 + n] the target's token after the last committed token, then after each node in order.

    Returns:
        The kept path, and the target's token after its end.

    Raises:
        ValueError: `chosen` does not have one token more than the draft.
    """
    if len(chosen) != 1 + len(draft):
        raise ValueError(f"{len(chosen)} chosen tokens for a draft of {len(draft)}: one more is needed")
    first_child: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(draft.parents, draft.ids, strict=True)):
        first_child.setdefault(edge, node)
    path: list[int] = []
    token = chosen[0]
    at = first_child.get((-1, token))
    while at is not None:
        path.append(at)
        token = chosen[1 + at]
        at = first_child.get((at, token))
    return Verdict(accepted=tuple(path), bonus=token)

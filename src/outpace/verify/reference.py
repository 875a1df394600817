"""The coupled rule once more, as it would be explained: slow, recursive, one sentence a line."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.types import Draft, Verdict

__all__ = ["verify_reference"]


def verify_reference(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """What `verify` has to return for a clean draft.

    Args:
        draft: chain or tree.
        chosen: [1 + n] the target's token after the last committed token, then after each node in order.
    """
    return _walk(draft, chosen, node=-1, path=())


def _walk(draft: Draft, chosen: Sequence[int], node: int, path: tuple[int, ...]) -> Verdict:
    token = chosen[1 + node]
    for child in range(len(draft)):
        if draft.parents[child] == node and draft.ids[child] == token:
            return _walk(draft, chosen, child, (*path, child))
    return Verdict(accepted=path, bonus=token)

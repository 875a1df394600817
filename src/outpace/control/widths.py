"""Chain or tree: what a drafter's branches have brought lately over what they cost.

Whenever a draft was free to branch, its tree is compared with the chain that it would have been: every token of either
counts its chance to be kept less the price of its row, and a row costs the tokens that its seconds would bring
otherwise. What is compared are chances, not outcomes, so few drafts say enough. Candidates that are not worth their
rows are dropped before verification, so trying costs little: what it takes to draft them.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LEAST_GAIN", "BranchGain", "gain_of"]

_FEW = 3  # drafts of a kind after which it is known
_MEMORY = 12.0  # drafts after which the older ones weigh a third
LEAST_GAIN = 0.01
"""Tokens a draft, below which nothing is gained."""
_KINDS = 12


class _Mean:
    """Of tokens gained a draft; old ones fade."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEMORY)


class BranchGain:
    """Of one drafter, or of one for one request, by how many requests were decoding: rows cost more beside others."""

    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: list[_Mean | None] = [None] * _KINDS

    def add(self, decoding: int, gain: float) -> None:
        kind = _kind(decoding)
        mean = self._means[kind]
        if mean is None:
            mean = self._means[kind] = _Mean()
        mean.add(gain)

    def expected(self, decoding: int) -> float | None:
        """Tokens gained a draft, negative if they are lost; None if that is not known yet."""
        mean = self._means[_kind(decoding)]
        return None if mean is None or mean.count < _FEW else mean.value


def gain_of(
    tree: Sequence[float], spine: Sequence[float], row: float, *, more: Sequence[float] = (), call: float = 0.0
) -> float:
    """Tokens that a tree brings over the chain that would have been drafted instead.

    Args:
        tree: chances of its nodes.
        spine: of the chain in it.
        row: tokens that a row costs.
        more: chances of the tokens that the chain would have had behind it, had branches not taken their place.
        call: tokens that drafting one of them costs.
    """
    own = sum(chance - row for chance in tree if chance > row)
    chain = sum(chance - row for chance in spine if chance > row)
    price = row + call
    return own - chain - sum(chance - price for chance in more if chance > price)


def _kind(decoding: int) -> int:
    return min(decoding.bit_length(), _KINDS - 1)

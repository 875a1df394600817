"""How far two texts are the same."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_length"]

_COMPARED = 256
"""Tokens compared in one piece."""


def common_length(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many tokens two texts have in common at their beginning, `most` at most."""
    most = min(most, len(first), len(second))
    begin = 0
    while begin < most and first[begin : begin + _COMPARED] == second[begin : begin + _COMPARED]:
        begin += _COMPARED
    while begin < most and first[begin] == second[begin]:
        begin += 1
    return min(begin, most)

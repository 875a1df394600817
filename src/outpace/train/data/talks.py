"""Which answers belong to one conversation: a later turn's prompt begins with that of an earlier one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["talks_of"]

_SHORTEST = 8
"""Tokens: a prompt of fewer (the first token of every text, say) begins many that have nothing in common."""


def talks_of(prompts: Sequence[array[int]]) -> list[int]:
    """The number of the conversation that each prompt belongs to; prompts of one number are turns of one.

    Args:
        prompts: whole prompts as token ids, in any order.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    talks = [0] * len(prompts)
    begun: list[int] = []  # prompts with which the one before began, the shortest first
    for number, which in enumerate(order):
        prompt = prompts[which]
        while begun and prompt[: len(prompts[begun[-1]])] != prompts[begun[-1]]:
            begun.pop()
        talks[which] = talks[begun[-1]] if begun else number
        if len(prompt) >= _SHORTEST:
            begun.append(which)
    return talks

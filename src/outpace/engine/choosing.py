"""The target's own choice at every row that asks for one, in one batched call a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.engine.pack import Block
from outpace.errors import OutpaceError
from outpace.sampling.choose import choose_rows
from outpace.types import Choice

__all__ = ["NO_TOKEN", "choose_blocks"]

NO_TOKEN = -1
"""Stands where a row's logits allow no choice: no draft token equals it, so it counts only if the walk ends there."""


def choose_blocks(blocks: Sequence[Block], logits: torch.Tensor) -> list[list[int]]:
    """For each block the target's token after its last committed token and after each draft token.

    Empty in the middle of a prefill. NO_TOKEN where the logits allow no choice (NaN).

    Args:
        blocks: of the step, in row order.
        logits: [N, V], N being the sum of the blocks' `num_choices`.
    """
    choices = [_choices(block) for block in blocks]
    flat = [choice for each in choices for choice in each]
    try:
        chosen = choose_rows(logits, flat)
    except OutpaceError:
        chosen = [_choose_or_not(logits[row : row + 1], choice) for row, choice in enumerate(flat)]
    tokens = iter(chosen)
    return [[next(tokens) for _ in each] for each in choices]


def _choose_or_not(row: torch.Tensor, choice: Choice) -> int:
    try:
        return choose_rows(row, [choice])[0]
    except OutpaceError:
        return NO_TOKEN


def _choices(block: Block) -> list[Choice]:
    """Node histories are known before the walk. In a chain the token after node i stands at the next position."""
    request = block.turn.request
    first = len(request.token_ids)
    return [Choice(request.params, request.seed, first + i, request.number) for i in range(block.num_choices)]

"""Which tokens of a large vocabulary are looked at."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outpace.train.data.packing import Windows

__all__ = ["SomeTokens", "covered", "draft_vocabulary", "some_tokens"]


class SomeTokens(NamedTuple):
    """Tokens that stand for all.

    Args:
        ids: [D] int64.
        bias: [D] float32, the logarithm of how many tokens each stands for. Added to the logits of both sides, it makes
            sums over these tokens what sums over all are in the mean.
    """

    ids: torch.Tensor
    bias: torch.Tensor


def draft_vocabulary(windows: Windows, size: int, vocab_size: int, always: frozenset[int]) -> torch.Tensor:
    """The tokens that are said most often.

    Args:
        windows: texts; only tokens to be predicted are counted.
        size: how many tokens are wanted.
        vocab_size: ids there are.
        always: ids that are in it however often they are said, as those that end an answer.

    Returns:
        [min(size, vocab_size)] int64 ids, ascending. Of tokens said equally often the lower ids.
    """
    counts = torch.bincount(windows.ids[windows.labels], minlength=vocab_size)[:vocab_size]
    counts[[token for token in always if token < vocab_size]] = int(counts.sum()) + 1
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def covered(windows: Windows, ids: torch.Tensor) -> float:
    """The share of the tokens to be predicted that are among `ids` [D]: the most that a head can have right."""
    said = windows.ids[windows.labels]
    return float(torch.isin(said, ids).float().mean()) if len(said) else 0.0


def some_tokens(common: torch.Tensor, vocab_size: int) -> SomeTokens:
    """The common ones, and half as many of the others, drawn by torch's generator.

    Args:
        common: [C] int64 ids, ascending.
        vocab_size: ids there are.
    """
    is_common = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    is_common[common] = True
    others = (~is_common).nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), dtype=torch.int64, device="cpu")[: max(1, len(common) // 2)]]
    weights = torch.ones(len(common) + len(drawn), dtype=torch.float32, device="cpu")
    weights[len(common) :] = len(others) / max(1, len(drawn))
    return SomeTokens(torch.cat((common, drawn)), weights.log())

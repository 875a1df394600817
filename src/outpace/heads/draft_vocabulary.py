"""Which tokens of the target a head guesses, as files say it: offsets (`d2t`) and marks (`t2d`)."""

from __future__ import annotations

import torch

__all__ = ["are_distinct", "marks_of", "offsets_of", "token_ids_of"]


def token_ids_of(offsets: torch.Tensor) -> torch.Tensor:
    """`d2t` [draft vocabulary], offsets -> [draft vocabulary] int64 ids of the target's tokens."""
    return offsets.to(torch.int64) + torch.arange(len(offsets), dtype=torch.int64, device="cpu")


def offsets_of(token_ids: torch.Tensor) -> torch.Tensor:
    """[draft vocabulary] ids of the target's tokens -> `d2t`: each id less its place, int64."""
    return token_ids.to(torch.int64) - torch.arange(len(token_ids), dtype=torch.int64, device="cpu")


def marks_of(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[draft vocabulary] ids of the target's tokens -> `t2d` [vocab_size] bool: whether the head guesses each."""
    marks = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    marks[token_ids] = True
    return marks


def are_distinct(token_ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether these are ids below `vocab_size`, and none comes twice."""
    if not len(token_ids):
        return False
    in_range = 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size
    return in_range and len(set(token_ids.tolist())) == len(token_ids)

"""What a kind of drafter tells the trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from outpace.models.config import DecoderConfig
from outpace.models.load import LoadedFiles
from outpace.train.acceptance import Chains
from outpace.train.target import Batch

__all__ = ["Kind", "Loss", "Material", "follows", "head_weight"]


@dataclass(frozen=True, slots=True)
class Loss:
    """What one batch was worth.

    Args:
        value: scalar, to be made small.
        rows: predictions it is the mean of.
        alpha: mean chance that a drawn token is kept.
        agreement: share of rows whose likeliest token is the target's.
    """

    value: torch.Tensor
    rows: int
    alpha: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Material:
    """What a drafter is made of before it has learnt anything.

    Args:
        files: the target's; weights are read from them.
        shape: of the target.
        vocab_size: ids the target's tokenizer knows.
        loss: kl, tv, lk or nla.
        chain: draft length at which acceptance is measured.
        name: of the target, as `models.resolve.lasting_name` gives it: what others find it by.
    """

    files: LoadedFiles
    shape: DecoderConfig
    vocab_size: int
    loss: str
    chain: int
    name: str

    def weight(self, name: str) -> torch.Tensor:
        """One of the target's tensors, a copy in float32."""
        return self.files.checkpoint.get(name).float().clone()


class Kind(Protocol):
    """A drafter that learns."""

    @property
    def module(self) -> nn.Module:
        """All that is trained."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering states it reads."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What has to be the same for a checkpoint to fit, JSON-able."""
        ...

    def loss(self, batch: Batch) -> Loss:
        """The mean over the rows that count."""
        ...

    def chains(self, batch: Batch) -> dict[str, Chains]:
        """What the target would keep, by the name of each drafter in training."""
        ...

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, only: Collection[str] | None = None
    ) -> dict[str, str]:
        """Writes what the engine serves. Returns `served` of the folder.

        Args:
            folder: to be made or written over.
            dtype: of the weights in the file.
            only: names of the drafters to be written, as `chains` has them; None for all.
        """
        ...

    def served(self, folder: Path) -> dict[str, str]:
        """How to serve what was written to a folder: {name: speculative config as JSON}."""
        ...


def head_weight(material: Material) -> torch.Tensor:
    """[V, H] the target's output head, cut to the ids its tokenizer knows."""
    name = "model.embed_tokens.weight" if material.shape.tie_word_embeddings else "lm_head.weight"
    return material.weight(name)[: material.vocab_size]


def follows(rows: torch.Tensor) -> torch.Tensor:
    """[N] ascending rows of a flattened batch -> [N] bool, whether each is the one behind the row before it.

    The last row of a piece never counts, so neighbours are always of one text.
    """
    result = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
    result[1:] = rows[1:] == rows[:-1] + 1
    return result

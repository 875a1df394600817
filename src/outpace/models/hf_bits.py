"""The probe of rows (`models.probe`) for models whose layers cannot be entered one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from outpace.kv.cache import KvCache
from outpace.models import probe
from outpace.models.decoder import Decoder, RowPath
from outpace.models.hf import TransformersModel
from outpace.types import Pack, Segment

__all__ = ["probe_rows", "same_bits"]


def probe_rows(model: TransformersModel, progress: probe.Progress | None = None) -> probe.ProbeReport:
    """Compares rows computed one at a time with the same rows in blocks, and sets `model.row_path` and
    `model.takes_trees`.

    See `models.probe.probe_rows`. Compared are logits and the first layer's keys and values; what goes wrong in a later
    layer shows in the logits.
    """
    return probe.probe_rows(cast(Decoder, _OneLayer(model)), progress)


def same_bits(model: TransformersModel, report: probe.ProbeReport) -> bool:
    """Whether the threads in use now give rows the bits they had in the report, in every pack."""
    return probe.same_bits(cast(Decoder, _OneLayer(model)), report)


class _OneLayer:
    """A model as a decoder of one layer, which takes ids and gives logits: as much as the probe asks for."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self.num_layers = 1
        self.vocab_size = model.vocab_size

    @property
    def row_path(self) -> RowPath:
        return self._model.row_path

    @row_path.setter
    def row_path(self, path: RowPath) -> None:
        self._model.row_path = path

    @property
    def takes_trees(self) -> bool:
        return self._model.takes_trees

    @takes_trees.setter
    def takes_trees(self, whether: bool) -> None:
        self._model.takes_trees = whether

    def new_cache(self, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
        return self._model.new_cache(num_lanes, capacity, max_rows)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None]

    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: KvCache,
    ) -> torch.Tensor:
        rows = torch.arange(len(hidden), dtype=torch.int64, device="cpu")
        return self._model.forward(Pack(hidden[:, 0], positions, tuple(segments), rows), cache).logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :0]

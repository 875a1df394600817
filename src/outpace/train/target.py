"""The target as a teacher: states of its layers and its distribution, for windows of text. It is never changed.

Its layers run on the kernels that serve it, in the precision that serves it, so that a drafter is trained on the very
states it will be given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from outpace.models.decoder import Decoder
from outpace.train.data.packing import NOTHING, Windows
from outpace.types import Segment

__all__ = ["Batch", "Said", "StateSource", "Target", "batch_of"]


class Said(NamedTuple):
    """What the target says behind each token of some windows.

    Args:
        log_sum: [B, W] float32 logarithm of the sum of its exponentiated logits.
        best: [B, W] int64 its likeliest token.
    """

    log_sum: torch.Tensor
    best: torch.Tensor


_CHUNK = 2 << 20
"""Numbers in one chunk of logits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows with what the target makes of them.

    Args:
        windows: B windows of W tokens.
        aux: {layer: [B, W, H]} states entering that layer; num_layers: leaving the last.
        target: whose they are.
        said: what it says, where that was computed before.
    """

    windows: Windows
    aux: dict[int, torch.Tensor]
    target: Target
    said: Said | None = None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] int64 rows of the flattened batch -> [n, V] float32 the target's logits behind them."""
        return self.target.logits(self.final(rows))

    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] int64 rows of the flattened batch -> [n, H] their states leaving the last layer."""
        return self.aux[self.target.num_layers].flatten(0, 1)[rows]


class StateSource(Protocol):
    """Gives the target's states of windows: computes them, or has them on disk."""

    def states(self, windows: Windows, which: torch.Tensor) -> dict[int, torch.Tensor]:
        """{layer: [n, W, H]} of windows number `which` [n]; `windows` are those very windows."""
        ...

    def said(self, windows: Windows, which: torch.Tensor) -> Said | None:
        """What the target says in the same windows, if that need not be computed."""
        ...


@dataclass
class Target:
    """A model that answers for its layers.

    Args:
        model: on the kernels that serve it.
        aux_layers: layers whose entering states are wanted; those leaving the last are always given.
    """

    model: Decoder
    aux_layers: Sequence[int] = ()
    seconds: float = field(default=0.0, init=False)
    """Time spent in this model so far."""

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    def states(
        self, windows: Windows, which: torch.Tensor, layers: Sequence[int] | None = None
    ) -> dict[int, torch.Tensor]:
        """See `StateSource`; slots behind the last text of a window are zero.

        Args:
            windows: the texts.
            which: their numbers, which do not matter here.
            layers: of which layers; None is those wanted of this target. Later ones do not run.
        """
        begun = time.perf_counter()
        wanted = sorted({*self.aux_layers, self.num_layers}) if layers is None else layers
        shape = (len(windows), windows.width, self.model.hidden_size)
        found = {layer: torch.zeros(shape, dtype=torch.float32, device="cpu") for layer in wanted}
        for number in range(len(windows)):
            states = self._run(windows[number : number + 1], wanted)
            for layer, rows in states.items():
                found[layer][number, : len(rows)] = rows
        self.seconds += time.perf_counter() - begun
        return found

    def said(self, windows: Windows, which: torch.Tensor) -> None:
        """See `StateSource`."""

    def say(self, final: torch.Tensor) -> Said:
        """What the states [B, W, H] leaving the last layer say."""
        rows = final.flatten(0, 1)
        log_sums, best = [], []
        for part in torch.split(rows, max(1, _CHUNK // self.model.vocab_size)):
            logits = self.logits(part)
            log_sums.append(logits.logsumexp(-1))
            best.append(logits.argmax(-1))
        shape = final.shape[:2]
        return Said(torch.cat(log_sums).view(shape), torch.cat(best).view(shape))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] states leaving the last layer -> [n, V] float32, to be used in gradients but not with one."""
        begun = time.perf_counter()
        logits = self.model.logits(hidden.contiguous())
        self.seconds += time.perf_counter() - begun
        return logits

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, W] int64 -> [B, W, H] float32 embeddings, to be used in gradients but not with one."""
        return self.model.embed(ids.flatten()).clone().view(*ids.shape, -1)

    def _run(self, window: Windows, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """{layer: [n, H]} of the n tokens of one window that are not filling."""
        pieces = window.pieces[0]
        count = int((pieces != NOTHING).sum())
        _, lengths = torch.unique_consecutive(pieces[:count], return_counts=True)
        cache = self.model.new_cache(len(lengths), int(lengths.max()), count)
        segments, begin = [], 0
        for length in lengths.tolist():
            lane = cache.allocate()
            assert lane is not None
            cache.reserve(lane, length)
            segments.append(Segment(lane, begin, begin + length, 0))
            begin += length
        aux = dict.fromkeys(wanted, torch.empty(0, dtype=torch.float32, device="cpu"))
        hidden = self.model.embed(window.ids[0, :count])
        self.model.run_layers(hidden, window.positions[0, :count], segments, 0, max(wanted), cache, aux)
        return aux


def batch_of(target: Target, windows: Windows, states: StateSource, which: torch.Tensor) -> Batch:
    """Windows number `which` [n] of some, with the target's states of them from `states`."""
    chosen = windows[which]
    return Batch(chosen, states.states(chosen, which), target, states.said(chosen, which))

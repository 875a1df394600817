"""Whether a model of transformers, run over outpace's cache, gives what its own eager pass gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outpace.errors import UnsupportedModel
from outpace.kv.cache import KvCache
from outpace.models.hf_probe import Study
from outpace.models.hf_session import BorrowedModel
from outpace.types import Pack, Segment

if TYPE_CHECKING:
    from outpace.models.hf import TransformersModel

__all__ = ["check_against_eager"]

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.15, torch.bfloat16: 0.15}
"""Distance of a whole pass, to which rounding adds up from layer to layer, and experts that it changes."""
_ROUNDED = 0.6  # the same with 8 bits a weight: rows of other positions or another text are farther from each other


def check_against_eager(model: TransformersModel, borrowed: BorrowedModel, found: Study, *, rounded: bool) -> None:
    """Computes the studied text in pieces of two requests, a draft taken back among them, and compares.

    Args:
        model: to be checked.
        borrowed: the same model, to run eagerly.
        found: of the study.
        rounded: its products are rounded to 8 bits.

    Raises:
        UnsupportedModel: logits, keys or values are not those of the model's own eager pass.
    """
    ids, rows = found.ids, torch.arange(len(found.ids), dtype=torch.int64, device="cpu")
    eager = borrowed.logits(ids, rows, rows, "eager")[:, : model.vocab_size].float()
    dtype = borrowed.model.get_output_embeddings().weight.dtype
    tolerance = _ROUNDED if rounded else _TOLERANCE[dtype]
    # In half precision an expert more or less may be chosen for a row; a mistake would show in most rows.
    typical = 0.5 if rounded or dtype != torch.float32 else 1.0
    logits, cache = _in_pieces(model, ids)
    errors = torch.stack([_row_distance(part, eager[: len(part)]).quantile(typical) for part in logits])
    parts = {"logits": float(errors.max())}
    # A state beside the cache spoils the rows behind each cut; there are many cuts, and no expert changes by rounding.
    whole = model.forward(_pack(((0, 0, len(ids)),), ids), _two_lanes(model, len(ids))).logits
    errors = torch.cat([_row_distance(part, whole[: len(part)]) for part in logits])
    parts["logits behind a cut"] = float(errors.quantile(0.9 if typical < 1 else 1.0))
    for layer, seen in enumerate(found.seen):
        for name, pool, wanted in (("keys", cache.keys(layer), seen.key), ("values", cache.values(layer), seen.value)):
            written = pool[: len(wanted), : len(ids), : wanted.shape[-1]]
            pair = [part.transpose(0, 1).flatten(1) for part in (written, wanted)]
            parts[f"{name} of layer {layer}"] = float(_row_distance(*pair).quantile(typical))
    limits = dict.fromkeys(parts, tolerance) | {"logits behind a cut": _TOLERANCE[dtype]}
    wrong = {name: error for name, error in parts.items() if not error < limits[name]}
    if wrong:
        name, error = next(iter(wrong.items()))
        raise UnsupportedModel(
            f"{model.kind} is not possible: in pieces of several requests its {name} differ from those of its own "
            f"eager pass by {error:.1e} (relative; at most {limits[name]:.0e} is rounding)"
        )


_Part = tuple[int, int, int]
"""(lane, first position, position after the last)."""


def _in_pieces(model: TransformersModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], KvCache]:
    """Logits of the text in lane 0 and of its beginning in lane 1, computed piece by piece, and their cache."""
    count, third = len(ids), len(ids) // 3
    cache = _two_lanes(model, count)
    found: list[list[torch.Tensor]] = [[], []]

    def compute(*parts: _Part, text: torch.Tensor = ids) -> None:
        pack = _pack(parts, text)
        logits = model.forward(pack, cache).logits
        for segment in pack.segments:
            found[segment.lane].append(logits[segment.begin : segment.end])

    compute((1, 0, 5), (0, 0, third))
    compute((0, third, third + 1), (1, 5, 6))
    compute((0, third + 1, third + 4), text=ids.flip(0))  # a draft that is taken back
    found[0].pop()
    cache.truncate(0, third + 1)
    cache.reserve(0, count)
    for row in range(third + 1, 2 * third - 1):
        compute((0, row, row + 1))
    compute((0, 2 * third - 1, 2 * third), (1, 6, 11))
    compute((0, 2 * third, count))
    return [torch.cat(parts) for parts in found], cache


def _two_lanes(model: TransformersModel, rows: int) -> KvCache:
    """A cache with lanes 0 and 1 of so many rows."""
    cache = model.new_cache(2, rows, 2 * rows)
    for _ in range(2):
        lane = cache.allocate()
        if lane is None or not cache.reserve(lane, rows):
            raise AssertionError("the probe's own cache is too small")
    return cache


def _pack(parts: tuple[_Part, ...], text: torch.Tensor) -> Pack:
    segments, begin = [], 0
    for lane, first, end in parts:
        segments.append(Segment(lane, begin, begin + end - first, first))
        begin += end - first
    return Pack(
        ids=torch.cat([text[first:end] for _, first, end in parts]),
        positions=torch.cat([torch.arange(first, end, dtype=torch.int64, device="cpu") for _, first, end in parts]),
        segments=tuple(segments),
        logits_rows=torch.arange(begin, dtype=torch.int64, device="cpu"),
    )


def _row_distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row [R]; what all numbers of a row have in common says nothing."""
    centred = wanted - wanted.mean(-1, keepdim=True)
    distance: torch.Tensor = torch.linalg.vector_norm(found - wanted, dim=-1)
    size: torch.Tensor = torch.linalg.vector_norm(centred, dim=-1).clamp_min(1e-30)
    return distance / size

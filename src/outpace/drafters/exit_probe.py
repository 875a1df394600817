"""Which layer to leave at, when nobody said: two seconds of measurement on the loaded model.

For every candidate layer E: how often the exit's most likely token is the model's own (a on a short text), and what
a step would cost. With c = cost of drafting one token and V = cost of verifying k of them, both over the cost of one
plain token, the predicted speed-up is (1 - a^(k+1)) / (1 - a) / (k c + V); layers below E run once, for the draft or in
verification, never twice. It says plainly when no exit pays, which is the usual case without a trained adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outpace.protocols import Cache, LayeredModel
from outpace.types import Pack, Segment

__all__ = ["SAMPLE_TEXT", "ExitEstimate", "probe_exits"]

SAMPLE_TEXT = """The library keeps every book on two cards, one by title and one by author. A borrower may take three.
def overdue(loans, today):
    \"\"\"Loans that should have come back before today, the oldest first.\"\"\"
    late = [loan for loan in loans if loan.due < today]
    return sorted(late, key=lambda loan: loan.due)
To find the total, add the first number to the second: 12 + 30 = 42. The answer is 42."""


@dataclass(frozen=True, slots=True)
class ExitEstimate:
    """What leaving at one layer would bring.

    Args:
        exit_layer: layers the draft runs.
        agreement: share of positions at which exit and model prefer the same token, 0 to 1.
        num_speculative_tokens: draft length with the best prediction.
        speedup: predicted decoding speed over plain decoding.
    """

    exit_layer: int
    agreement: float
    num_speculative_tokens: int
    speedup: float


def probe_exits(
    model: LayeredModel, cache: Cache, ids: Sequence[int], *, most_tokens: int, seconds: float = 2.0
) -> ExitEstimate:
    """The most promising exit of a model with at least two layers.

    Args:
        model: the target, loaded.
        cache: its cache; a lane is used and given back.
        ids: a short text, 32 tokens or more; 128 are plenty.
        most_tokens: longest draft considered, at least 1.
        seconds: time after which no further layer is tried; the later, likelier layers come first.
    """
    deadline = time.perf_counter() + seconds
    layers = sorted({max(1, round(model.num_layers * share / 16)) for share in range(4, 16)} - {model.num_layers})
    lane = cache.allocate()
    assert lane is not None, "the probe needs a free lane"
    try:
        assert cache.reserve(lane, len(ids))
        every_row = torch.arange(len(ids), dtype=torch.int64, device="cpu")
        result = model.forward(_pack(ids, 0, lane, every_row, tuple(layers)), cache)
        own = result.logits.argmax(-1)
        agreement: dict[int, float] = {}
        for layer in reversed(layers):
            agreement[layer] = (model.logits(result.aux[layer]).argmax(-1) == own).float().mean().item()
            if time.perf_counter() > deadline:
                break
        costs = _row_costs(model, cache, ids, lane, most_tokens)
        head = _seconds(partial(model.logits, result.aux[layers[0]][:1]))
    finally:
        cache.release(lane)
    head_share = min(0.9, head / costs[0])
    estimates = [
        _estimate(layer, a, layer / model.num_layers, head_share, [cost / costs[0] for cost in costs])
        for layer, a in agreement.items()
    ]
    return max(estimates, key=lambda e: e.speedup)


def _estimate(layer: int, agreement: float, depth: float, head_share: float, costs: Sequence[float]) -> ExitEstimate:
    """Best draft length for one exit. `costs[k]` is the cost of k + 1 rows over one row's."""
    best = ExitEstimate(layer, agreement, 1, 0.0)
    draft_token = depth * (1 - head_share) + head_share
    for k in range(1, len(costs)):
        tokens = sum(agreement**i for i in range(k + 1))
        # Of the verification's lower layers only the last draft token's row is left to run.
        verify = costs[k] - depth * (1 - head_share) * max(0.0, costs[k] - 1)
        speedup = tokens / (k * draft_token + verify)
        if speedup > best.speedup:
            best = ExitEstimate(layer, agreement, k, speedup)
    return best


def _row_costs(model: LayeredModel, cache: Cache, ids: Sequence[int], lane: int, most_tokens: int) -> list[float]:
    """Seconds of a pass over 1, 2, ... most_tokens + 1 rows at the end of the text."""
    costs: list[float] = []
    for rows in range(1, min(most_tokens, len(ids) - 1) + 2):
        wanted = torch.arange(rows, dtype=torch.int64, device="cpu")
        pack = _pack(ids[-rows:], len(ids) - rows, lane, wanted, ())
        costs.append(_seconds(partial(model.forward, pack, cache)))
    return costs


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]


def _pack(ids: Sequence[int], first: int, lane: int, wanted: torch.Tensor, aux_layers: tuple[int, ...]) -> Pack:
    positions = torch.arange(first, first + len(ids), dtype=torch.int64, device="cpu")
    rows = torch.tensor(list(ids), dtype=torch.int64, device="cpu")
    return Pack(rows, positions, (Segment(lane, 0, len(ids), first),), wanted, aux_layers)

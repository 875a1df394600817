"""How much memory training will take, asked before data is made, which takes hours; the system kills without asking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from outpace.errors import OutOfMemory
from outpace.heads import eagle3_tensors
from outpace.models.adapter import adapter_tensors
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.files import format_bytes
from outpace.models.load import available_bytes
from outpace.models.memory import RESERVE_BYTES
from outpace.train.kinds.draft import DraftOptions, chosen_layers
from outpace.train.kinds.eagle3 import LEAST_SHARE, Eagle3Options, head_config
from outpace.train.settings import TrainSettings

__all__ = ["Needs", "require_training_fit", "training_needs"]

_BYTES_OF_A_WEIGHT = 4 + 4 + 8 + 12 + 4
"""The weight, its gradient, the optimiser's two moments; a checkpoint of three of them, and what it was before it was
rounded."""
_LOGITS = 256 << 20
"""What the output heads of target and drafter work in, a few rows at a time."""
_SHARED_LAWS = 1 << 30
"""What the target's distributions take that several exits share."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that training takes at most, about, in bytes.

    Args:
        weights: those that learn, with gradients, moments and checkpoint, and those that stay.
        batch: states, what a gradient needs to be kept, and the target's distributions.
    """

    weights: int
    batch: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """What learns: numbers trained, numbers kept beside them, passes of all rows through a layer, probabilities in a
    row, inner states that are read, and passes of all rows whose shares of attention are kept."""

    trained: int
    kept: int
    passes: float
    laws: int
    states: int
    squares: float = 0.0


def training_needs(
    kind: str, options: Mapping[str, Any], shape: DecoderConfig, vocab_size: int, settings: TrainSettings, window: int
) -> Needs:
    """What a run will take, the target itself aside.

    Args:
        kind: early-exit, eagle3 or draft.
        options: of this kind.
        shape: of the target.
        vocab_size: ids its tokenizer knows.
        settings: of the run.
        window: tokens in a window.
    """
    found = _shape_of(kind, options, shape, vocab_size)
    tokens = settings.batch_windows * window
    inside = 12 * shape.hidden_size + 6 * shape.intermediate_size + 6 * shape.num_heads * shape.head_dim
    square = settings.batch_windows * window * window
    several = kind == "early-exit" and found.passes > 1
    rows = tokens * (found.passes * inside + found.states * shape.hidden_size + found.laws)
    # The mask, as it is and in float32, and where attention is computed step by step, scores and shares.
    batch = int(4 * (rows + 2 * square + 2 * found.squares * shape.num_heads * square))
    return Needs(
        weights=_BYTES_OF_A_WEIGHT * found.trained + 4 * found.kept,
        batch=batch + _LOGITS + (min(_SHARED_LAWS, 4 * tokens * vocab_size) if several else 0),
    )


def require_training_fit(needs: Needs, model_bytes: int, settings: TrainSettings, window: int) -> None:
    """Raises OutOfMemory if there is less memory than training takes; says what takes how much of it.

    Args:
        needs: as from `training_needs`.
        model_bytes: what the target takes.
        settings: of the run.
        window: tokens in a window.
    """
    free = available_bytes()
    total = model_bytes + needs.weights + needs.batch
    if free is None or total + RESERVE_BYTES <= free:
        return
    raise OutOfMemory(
        f"training takes about {format_bytes(total + RESERVE_BYTES)} of memory ({format_bytes(model_bytes)} for the "
        f"model, {format_bytes(needs.weights)} for the drafter's weights, {format_bytes(needs.batch)} for passes over "
        f"{settings.batch_windows} windows of {window} tokens), {format_bytes(free)} are free: free some, or take "
        "fewer --batch-windows (with more --accumulate) or a shorter --window"
    )


def _shape_of(kind: str, options: Mapping[str, Any], shape: DecoderConfig, vocab_size: int) -> _Shape:
    head = vocab_size * shape.hidden_size
    if kind == "eagle3":
        wanted = Eagle3Options(**options)
        guesses = min(wanted.draft_vocab, vocab_size)
        trained = _numbers(eagle3_tensors(head_config(shape, guesses, wanted)))
        kept = 0 if wanted.train_head else guesses * shape.hidden_size
        looked_at = sum(max(LEAST_SHARE, wanted.row_share**step) for step in range(wanted.unroll))
        return _Shape(trained, kept, looked_at, guesses, 4, squares=looked_at - 1)
    if kind == "draft":
        own = DraftOptions(**options)
        layers = len(chosen_layers(own, shape.num_layers))
        every = _numbers(expected_tensors(replace(shape, num_layers=layers, windows=shape.windows[:layers])))
        still = 0 if own.train_embedding else shape.vocab_size * shape.hidden_size * (2 - shape.tie_word_embeddings)
        return _Shape(every - still, still, layers, 0, 1)
    exits = len(options.get("exit_layers") or [0])
    return _Shape(exits * _numbers(adapter_tensors(shape)), head, exits, 0, exits + 1)


def _numbers(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(prod, tensors.values()))

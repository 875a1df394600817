"""The parts of a decoder that depend on the kernels: its layers, its head, its embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outpace.kv.cache import KvCache
from outpace.models.config import DecoderConfig, ReadsPairs
from outpace.models.native.layers import NativeEmbedding, NativeHead, NativeLayers
from outpace.models.precision import Precision
from outpace.models.torch_layers import TorchEmbedding, TorchHead, TorchLayers
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["Embedding", "Head", "LayerStack", "Stack", "load_layers", "load_stack", "new_cache"]


class LayerStack(Protocol):
    """Some decoder layers over a cache with a layer for each."""

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights, in bytes; all of it is read to compute a row."""
        ...

    def describe(self) -> str:
        """Precision in a few words, for people."""
        ...

    def run(
        self,
        hidden: torch.Tensor,
        rope: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: KvCache,
        aux: dict[int, torch.Tensor],
        keep: torch.Tensor | None,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs layers [begin, end) and writes their cache rows.

        Args:
            hidden: [R, H] float32, states entering layer `begin`; not changed.
            rope: [R, 1, D/2] complex64 from `RopeTable.at`.
            segments: where the rows belong, covering [0, R).
            begin: first layer.
            end: the layer after the last.
            cache: the rows' cache.
            aux: for each of its keys in [begin, end] the value becomes the [R, H] states entering that layer.
            keep: [N] int64 rows, ascending, whose result is wanted; all are written to the cache. None is all, which
                it must be where `aux` asks for the states entering layer `end`.
            beside: [R, H] float32, what layers that read pairs read beside the stream; None for others.

        Returns:
            [R, H] states entering layer `end`, or [N, H] with `keep`.
        """
        ...


class Head(Protocol):
    """A norm and the output head behind it."""

    @property
    def weight_bytes(self) -> int: ...

    def describe(self) -> str:
        """Precision in a few words, for people."""
        ...

    def with_norm(self, norm: torch.Tensor) -> Any:
        """A head of the same matrix, shared, behind a norm of this [H] weight."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] states -> [N, V] float32."""
        ...


class Embedding(Protocol):
    """The states that token ids stand for."""

    @property
    def weight_bytes(self) -> int: ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[R] int64 -> [R, H] float32."""
        ...


@dataclass(frozen=True, slots=True)
class Stack:
    """All parts of one decoder."""

    embedding: Embedding
    layers: LayerStack
    head: Head


def new_cache(config: DecoderConfig, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
    """An empty cache for layers of this shape.

    Args:
        config: the shape, and how many layers.
        num_lanes: requests side by side.
        capacity: rows in a lane.
        max_rows: rows reserved at most over all lanes.
    """
    return KvCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_lanes=num_lanes,
        capacity=capacity,
        max_rows=max_rows,
    )


def load_layers(
    config: DecoderConfig,
    weights: WeightSource,
    prefixes: Sequence[str],
    precision: Precision,
    progress: Callable[[], None] = lambda: None,
    pairs: ReadsPairs | None = None,
) -> LayerStack:
    """Layers from the tensors under these prefixes, on the kernels that the precision names.

    `progress` is called after each. With `pairs` they read what `LayerStack.run` gets `beside`, and need it.
    """
    kind = NativeLayers if precision.kernels == "native" else TorchLayers
    return kind(config, weights, prefixes, precision, progress, pairs)


def load_stack(
    config: DecoderConfig, weights: WeightSource, vocab_size: int, precision: Precision, progress: Callable[[], None]
) -> Stack:
    """A whole decoder's parts; `progress` is called after each layer and after the head.

    Raises:
        KeyError: a tensor is missing.
    """
    native = precision.kernels == "native"
    prefixes = [f"model.layers.{layer}." for layer in range(config.num_layers)]
    layers = load_layers(config, weights, prefixes, precision, progress)
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    embedding = (NativeEmbedding if native else TorchEmbedding)(weights, "model.embed_tokens.weight")
    load_head = NativeHead.load if native else TorchHead.load
    head = load_head(config, weights, "model.norm.weight", name, vocab_size, precision)
    progress()
    return Stack(embedding, layers, head)

"""Decoder layers, embedding and output head on torch's own kernels: for processors without the native ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outpace.kv.attention import AttentionPlan
from outpace.kv.cache import KvCache
from outpace.models.blocks import Block, RmsNorm
from outpace.models.config import DecoderConfig, ReadsPairs
from outpace.models.linear import Linear, pack_linear
from outpace.models.precision import Precision
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["TorchEmbedding", "TorchHead", "TorchLayers"]


class TorchLayers:
    """`stack.LayerStack` on torch.

    Args:
        config: the decoder's shape.
        weights: its tensors; none is kept.
        prefixes: what the tensors of each layer begin with, as "model.layers.0.".
        precision: of the matrices.
        progress: called after each layer.
        pairs: the layers read pairs; see `stack.load_layers`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        prefixes: Sequence[str],
        precision: Precision,
        progress: Callable[[], None],
        pairs: ReadsPairs | None = None,
    ) -> None:
        self.row_by_row = False  # attention of every row on its own: slow, and row-independent on any machine
        self._config = config
        self.blocks: list[Block] = []
        for prefix in prefixes:
            self.blocks.append(Block(config, weights, prefix, precision.quantization, pairs))
            progress()

    @property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes for block in self.blocks)

    def describe(self) -> str:
        return self.blocks[0].description

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
        """See `stack.LayerStack.run`."""
        plans = self._plans(segments, begin, end)
        for layer in range(begin, end):
            if layer in aux:
                aux[layer] = hidden
            rows = keep if layer == end - 1 else None
            hidden = self.blocks[layer](hidden, rope, plans[self._config.windows[layer]], cache, layer, rows, beside)
        if end in aux:
            aux[end] = hidden
        return hidden if keep is None or begin < end else hidden[keep]

    def _plans(self, segments: Sequence[Segment], begin: int, end: int) -> dict[int | None, AttentionPlan]:
        """One plan for each window the layers use."""
        return {
            window: AttentionPlan(
                segments,
                num_heads=self._config.num_heads,
                num_kv_heads=self._config.num_kv_heads,
                head_dim=self._config.head_dim,
                sliding_window=window,
                row_by_row=self.row_by_row,
            )
            for window in set(self._config.windows[begin:end])
        }


class TorchHead:
    """`stack.Head` on torch.

    Args:
        norm: the norm before the head.
        matrix: the head.
        epsilon: of norms.
    """

    def __init__(self, norm: RmsNorm, matrix: Linear, epsilon: float) -> None:
        self._norm, self._matrix, self._epsilon = norm, matrix, epsilon

    @classmethod
    def load(
        cls, config: DecoderConfig, weights: WeightSource, norm: str, name: str, vocab_size: int, precision: Precision
    ) -> TorchHead:
        """The head and its norm from these tensors, cut to `vocab_size` ids."""
        matrix = pack_linear(weights.get(name)[:vocab_size], None, precision.quantization)
        return cls(RmsNorm(weights.get(norm), config.rms_norm_eps), matrix, config.rms_norm_eps)

    @property
    def weight_bytes(self) -> int:
        return self._norm.weight_bytes + self._matrix.weight_bytes

    def with_norm(self, norm: torch.Tensor) -> TorchHead:
        """The same matrix, shared, behind another norm."""
        return TorchHead(RmsNorm(norm, self._epsilon), self._matrix, self._epsilon)

    def describe(self) -> str:
        return self._matrix.describe()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V] float32."""
        return self._matrix(self._norm(hidden))


class TorchEmbedding:
    """`stack.Embedding` in the float type it is stored in."""

    def __init__(self, weights: WeightSource, name: str) -> None:
        self._table = weights.get(name)
        self.weight_bytes = self._table.nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[R] int64 -> [R, H] float32."""
        return self._table.index_select(0, ids).float()

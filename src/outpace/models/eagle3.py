"""An EAGLE-3 head beside the lean decoder (`protocols.FeatureHead`), on the kernels that its precision names.

`eagle3_config` says what it computes. It has a cache of its own, of one layer; embeddings and output head may be the
target's. What it guesses changes the time a text takes, never the text, so its bits need equal nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outpace.kv.cache import KvCache
from outpace.models.blocks import RmsNorm
from outpace.models.config import DecoderConfig, ReadsPairs
from outpace.models.decoder import Decoder
from outpace.models.eagle3_config import LAYER_PREFIX, Eagle3Config
from outpace.models.head_linear import HeadLinear
from outpace.models.native.layers import NativeEmbedding, NativeHead
from outpace.models.precision import Precision
from outpace.models.rope import RopeTable
from outpace.models.stack import load_layers, new_cache
from outpace.models.stored import QuantizedBlocks
from outpace.models.torch_layers import TorchEmbedding, TorchHead
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["Eagle3Head", "with_target_rows"]

_HEAD, _EMBEDDING, _NORM = "lm_head.weight", "embed_tokens.weight", "norm.weight"


class Eagle3Head:
    """A head, loaded.

    Args:
        target: the model it drafts for; embeddings and output head are shared with it where the head has none.
        config: its shape.
        weights: its tensors, by the names of `eagle3_tensors`; none is kept but embeddings.
        token_ids: [draft vocabulary] int64, the target's token that each guess stands for; None for all, in order.
        target_weights: the target's tensors, for a head that is made of rows of its output head.
        precision: of the weights; None is the target's.

    Raises:
        CheckpointError: the target has no such layers, or a tensor is missing.
    """

    def __init__(
        self,
        target: Decoder,
        config: Eagle3Config,
        weights: WeightSource,
        *,
        token_ids: torch.Tensor | None = None,
        target_weights: WeightSource | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.config = config
        self.precision = precision or target.precision
        self.vocab_size = target.vocab_size
        self.aux_layers = config.aux_layers_of(target.num_layers)
        native = self.precision.kernels == "native"
        self._target = target
        self._rope = RopeTable(config.layer.rope, config.layer.head_dim)
        self._fuse = _Fuse(config, weights, self.precision)
        pairs = ReadsPairs(config.norm_before_residual)
        self._layers = load_layers(config.layer, weights, [LAYER_PREFIX], self.precision, pairs=pairs)
        self._norm = RmsNorm(weights.get(_NORM), config.layer.rms_norm_eps) if config.norm_output else None
        self._embedding = None
        if _EMBEDDING in weights.shapes:
            self._embedding = (NativeEmbedding if native else TorchEmbedding)(weights, _EMBEDDING)
        self._token_ids, self._columns = _known_tokens(token_ids, self.vocab_size)
        self._shares_matrix = config.shares_target_head and token_ids is None and _same_norms(config, target)
        if self._shares_matrix:
            self._head = target.head.with_norm(weights.get(_NORM))
        else:
            if config.shares_target_head:
                assert target_weights is not None, "rows of the target's head are read from its weights"
                weights = with_target_rows(weights, target.config, target_weights, token_ids)
            load = NativeHead.load if native else TorchHead.load
            size = self.vocab_size if token_ids is None else len(token_ids)
            self._head = load(config.layer, weights, _NORM, _HEAD, size, self.precision)

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights beside the target's, in bytes."""
        own = 0 if self._embedding is None else self._embedding.weight_bytes
        shared = self._target.head.weight_bytes if self._shares_matrix else 0
        return self.bytes_per_token - shared + own

    @property
    def bytes_per_token(self) -> int:
        """Weights read to compute one row and its logits."""
        read: int = self._fuse.weight_bytes + self._layers.weight_bytes + self._head.weight_bytes
        return read

    def describe(self) -> str:
        """Precision of the linear layers, for people."""
        return self._layers.describe()

    def new_cache(self, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
        """An empty cache for it; see `stack.new_cache`."""
        return new_cache(self.config.layer, num_lanes, capacity, max_rows)

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[R, aux layers * Ht] states of the target, side by side -> [R, H] features."""
        return self._fuse(states)

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        wanted: torch.Tensor,
        cache: KvCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `protocols.FeatureHead.forward`."""
        beside = self._target.embed(ids) if self._embedding is None else self._embedding.rows(ids)
        rope = self._rope.at(positions)
        hidden = self._layers.run(features, rope, segments, 0, 1, cache, {}, wanted, beside)
        if not len(hidden):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu"), hidden
        logits = self._over_target(self._head.logits(hidden))
        return logits, hidden if self._norm is None else self._norm(hidden)

    def _over_target(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, draft vocabulary] -> [N, V], -inf for tokens that are never guessed."""
        if self._token_ids is None:
            return logits
        known = logits if self._columns is None else logits[:, self._columns]
        found = torch.full((len(logits), self.vocab_size), -torch.inf, dtype=torch.float32, device="cpu")
        return found.index_copy_(1, self._token_ids, known)


class _Fuse:
    """States of the target, side by side, to features."""

    def __init__(self, config: Eagle3Config, weights: WeightSource, precision: Precision) -> None:
        eps = config.layer.rms_norm_eps
        self._joint = RmsNorm(weights.get("input_norm.weight"), eps) if config.norm_before_fc else None
        names = [f"fc_norm.{each}.weight" for each in range(config.num_aux)] if config.fc_norm else []
        self._each = [RmsNorm(weights.get(name), eps) for name in names]
        bias = weights.get("fc.bias") if config.fc_bias else None
        self._linear = HeadLinear(weights.get("fc.weight"), precision, bias)
        self.weight_bytes = self._linear.weight_bytes

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[R, aux layers * Ht] float32 -> [R, H] float32."""
        if self._each:
            parts = states.chunk(len(self._each), -1)
            states = torch.cat([norm(part) for norm, part in zip(self._each, parts, strict=True)], -1)
        if self._joint is not None:
            states = self._joint(states)
        return self._linear(states)


@dataclass(frozen=True, slots=True)
class _Overlay:
    """A `WeightSource` in which one matrix is some rows of a matrix elsewhere.

    Args:
        others: all the other tensors.
        name: of the matrix.
        source: where its rows are.
        source_name: what it is called there.
        rows: [N] int64, which; None for all.
    """

    others: WeightSource
    name: str
    source: WeightSource
    source_name: str
    rows: torch.Tensor | None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        count, width = self.source.shapes[self.source_name]
        return {**self.others.shapes, self.name: (count if self.rows is None else len(self.rows), width)}

    def get(self, name: str) -> torch.Tensor:
        if name != self.name:
            return self.others.get(name)
        matrix = self.source.get(self.source_name)
        return matrix if self.rows is None else matrix[self.rows]

    def blocks(self, name: str) -> QuantizedBlocks | None:
        if name != self.name:
            return self.others.blocks(name)
        found = self.source.blocks(self.source_name)
        if found is None or self.rows is None:
            return found
        # Rows are independent, so those that are wanted keep their numbers.
        return QuantizedBlocks(found.kind, (len(self.rows), found.shape[1]), found.data[self.rows])


def with_target_rows(
    weights: WeightSource, target: DecoderConfig, target_weights: WeightSource, token_ids: torch.Tensor | None
) -> WeightSource:
    """A head's weights with an output head, which is made of rows of the target's.

    Args:
        weights: of the head.
        target: the target's shape.
        target_weights: of the target.
        token_ids: [draft vocabulary] int64, which rows; None for all.
    """
    name = "model.embed_tokens.weight" if target.tie_word_embeddings else "lm_head.weight"
    return _Overlay(weights, _HEAD, target_weights, name, token_ids)


def _known_tokens(token_ids: torch.Tensor | None, vocab_size: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ids below `vocab_size`, and the columns they stand in where these are not all; None for every id in order."""
    if token_ids is None:
        return None, None
    known = token_ids < vocab_size
    return (token_ids, None) if bool(known.all()) else (token_ids[known], known.nonzero()[:, 0])


def _same_norms(config: Eagle3Config, target: Decoder) -> bool:
    return config.layer.rms_norm_eps == target.config.rms_norm_eps

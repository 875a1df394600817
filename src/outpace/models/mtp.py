"""A checkpoint's own MTP layer beside the lean decoder (`protocols.FeatureHead`).

`mtp_config` says what it computes. It has a cache of its own, of one layer; embeddings and output head are the
target's. What it guesses changes the time a text takes, never the text, so its bits need equal nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.kv.cache import KvCache
from outpace.models.blocks import RmsNorm
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.head_linear import HeadLinear
from outpace.models.precision import Precision
from outpace.models.rope import RopeTable
from outpace.models.stack import load_layers, new_cache
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["MtpHead"]


class MtpHead:
    """An MTP layer, loaded.

    Args:
        target: the model it drafts for, of the same widths, vocabulary and epsilon.
        config: the shape of its layer, as from `mtp_layer`.
        weights: its tensors, by the names of `layer_tensors`; none is kept.
        precision: of the weights; None is the target's.
    """

    def __init__(
        self, target: Decoder, config: DecoderConfig, weights: WeightSource, *, precision: Precision | None = None
    ) -> None:
        self.config = config
        self.precision = precision or target.precision
        self.vocab_size = target.vocab_size
        # The state behind the last layer is the one that would enter the next.
        self.aux_layers = (target.num_layers,)
        self._target = target
        self._rope = RopeTable(config.rope, config.head_dim)
        eps, last = config.rms_norm_eps, weights.get("final_layernorm.weight")
        self._token_norm = RmsNorm(weights.get("token_layernorm.weight"), eps)
        self._state_norm = RmsNorm(weights.get("hidden_layernorm.weight"), eps)
        self._enter = HeadLinear(weights.get("input_proj.weight"), self.precision)
        self._layers = load_layers(config, weights, [""], self.precision)
        self._last_norm = RmsNorm(last, eps)
        self._head = target.head.with_norm(last)

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights beside the target's, in bytes."""
        return self.bytes_per_token - self._target.head.weight_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weights read to compute one row and its logits."""
        norms = (self._token_norm, self._state_norm, self._last_norm)
        parts = (self._enter, self._layers, self._head, *norms)
        return sum(int(part.weight_bytes) for part in parts)

    def describe(self) -> str:
        """Precision of the linear layers, for people."""
        return self._layers.describe()

    def new_cache(self, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
        """An empty cache for it; see `stack.new_cache`."""
        return new_cache(self.config, num_lanes, capacity, max_rows)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[R, H] states leaving the target's last layer -> the same: it reads them as they are."""
        return states

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
        # Other engines blank the first embedding, for they carry a row that has no state before it; here is none.
        beside = self._token_norm(self._target.embed(ids))
        stream = self._enter(torch.cat((self._state_norm(features), beside), -1))
        hidden = self._layers.run(stream, self._rope.at(positions), segments, 0, 1, cache, {}, wanted)
        if not len(hidden):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu"), hidden
        return self._head.logits(hidden), self._last_norm(hidden)

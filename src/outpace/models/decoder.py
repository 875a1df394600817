"""The lean decoder: Llama, SmolLM, Mistral, Qwen2, Qwen3 and MiMo over outpace's own cache and packed linear layers.

On a CPU a row's hidden states, logits and cache rows have the same bits in every pack: alone, in a verification
block, in a prefill chunk, beside other requests. `probe.probe_rows` checks this on the loaded weights and sets
`Decoder.row_path` to a slower way where it does not hold, and `Decoder.takes_trees` by what it found of trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import Enum

import torch

from outpace.errors import CheckpointError, InvalidParameter
from outpace.kv.cache import KvCache
from outpace.models.config import DecoderConfig
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision
from outpace.models.rope import RopeTable
from outpace.models.stack import load_stack, new_cache
from outpace.models.torch_layers import TorchLayers
from outpace.models.weights import WeightSource
from outpace.types import ForwardResult, Pack, Segment

__all__ = ["Decoder", "RowPath"]


class RowPath(Enum):
    """How the rows of a pack are computed, fastest first; the value is for people."""

    BLOCKS = "whole packs at once"
    ROW_ATTENTION = "whole packs, attention one row at a time"
    SINGLE_ROWS = "one row at a time"


class Decoder:
    """A causal language model (`protocols.TargetModel`).

    Results are inference tensors: change them in place only inside `torch.inference_mode`.

    Args:
        config: its shape.
        weights: its tensors; none is kept but the embedding.
        precision: of the weights; None is fp32 on the native kernels where they run, else on torch's.
        vocab_size: ids the tokenizer knows; the head is cut to it, so that padded ids do not exist. None, or more
            than the checkpoint has, keeps the checkpoint's.
        max_model_len: longest prompt plus output wanted; None is the model's own.
        progress: called with (parts done, all parts) after each; parts are the layers and, last, the head.

    Raises:
        InvalidParameter: max_model_len beyond the model's own.
        CheckpointError: a tensor is missing.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        *,
        precision: Precision | None = None,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if max_model_len is not None and max_model_len > config.max_positions:
            raise InvalidParameter(
                f"max_model_len={max_model_len} is not possible: the model has {config.max_positions} positions"
            )
        self.config = config
        self.precision = precision or Precision(kernels="native" if why_unavailable() is None else "torch")
        self.row_path = RowPath.BLOCKS
        self.takes_trees = True
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        self.max_model_len = max_model_len or config.max_positions
        self.rope = RopeTable(config.rope, config.head_dim)
        done = itertools.count(1)

        def part_done() -> None:
            if progress is not None:
                progress(next(done), self.num_layers + 1)

        try:
            parts = load_stack(config, weights, self.vocab_size, self.precision, part_done)
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no tensor {error.args[0]!r}") from error
        self.layers, self.head, self._embedding = parts.layers, parts.head, parts.embedding

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights, in bytes."""
        return self.bytes_per_token + self._embedding.weight_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weights read to compute one row: all but the embedding, of which a row is read."""
        return self.layers.weight_bytes + self.head.weight_bytes

    def describe(self) -> str:
        """Precision of the linear layers, for people."""
        layers, head = self.layers.describe(), self.head.describe()
        return layers if head in layers else f"{layers}, head in {head}"

    def new_cache(self, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
        """An empty cache of this model's shape; see `stack.new_cache`."""
        return new_cache(self.config, num_lanes, capacity, max_rows)

    @torch.inference_mode()
    def forward(self, pack: Pack, cache: KvCache) -> ForwardResult:
        """Computes a pack once and writes its rows to the cache.

        Rows with a kept state skip the layers below `pack.resume_layer`; in aux layers below it they are zeros.

        Raises:
            ValueError: kept rows are not the first of their segments.
        """
        aux = {
            layer: torch.zeros(pack.num_rows, self.hidden_size, dtype=torch.float32, device="cpu")
            for layer in pack.aux_layers
        }
        begin = pack.resume_layer if pack.resume_rows is not None else 0
        hidden = self._enter(pack, begin, cache, aux)
        all_wanted = self.num_layers in aux or len(pack.logits_rows) == pack.num_rows
        keep = None if all_wanted else pack.logits_rows
        hidden = self._run(hidden, pack.positions, pack.segments, begin, self.num_layers, cache, aux, keep)
        wanted = hidden if keep is not None or len(hidden) == len(pack.logits_rows) else hidden[pack.logits_rows]
        return ForwardResult(logits=self.logits(wanted), aux=aux)

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[R] int64 -> [R, H] float32, the states entering layer 0."""
        return self._embedding.rows(ids)

    @torch.inference_mode()
    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: KvCache,
        aux: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Runs layers [begin, end) and writes their cache rows.

        Args:
            hidden: [R, H] states entering layer `begin`; not changed.
            positions: [R] int64.
            segments: where the rows belong, covering [0, R).
            begin: first layer.
            end: the layer after the last.
            cache: the rows' cache.
            aux: for each of its keys in [begin, end] the value becomes the [R, H] states entering that layer.

        Returns:
            [R, H] states entering layer `end`.
        """
        return self._run(hidden, positions, segments, begin, end, cache, {} if aux is None else aux, None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [N, H] states leaving the last layer -> [N, V] float32."""
        if not len(hidden):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu")
        if self.row_path is RowPath.SINGLE_ROWS:
            return torch.cat([self.head.logits(row) for row in torch.split(hidden, 1)])
        return self.head.logits(hidden)

    def _enter(self, pack: Pack, begin: int, cache: KvCache, aux: dict[int, torch.Tensor]) -> torch.Tensor:
        """States of all rows entering layer `begin`: computed for those without a kept state, then joined."""
        if pack.resume_rows is None or pack.resume_hidden is None:
            return self.embed(pack.ids)
        rest, segments = _without_kept(pack.segments, pack.resume_rows.tolist())
        hidden = torch.empty(pack.num_rows, self.hidden_size, dtype=torch.float32, device="cpu")
        hidden[pack.resume_rows] = pack.resume_hidden
        if rest:
            rows = torch.tensor(rest, dtype=torch.int64, device="cpu")
            below = {layer: aux[layer] for layer in aux if layer < begin}
            states = self.embed(pack.ids[rows])
            hidden[rows] = self._run(states, pack.positions[rows], segments, 0, begin, cache, below, None)
            for layer, found in below.items():
                aux[layer][rows] = found
        return hidden

    def _run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: KvCache,
        aux: dict[int, torch.Tensor],
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """`run_layers`; with `keep`, the last layer finishes only these rows and returns them."""
        if self.row_path is RowPath.SINGLE_ROWS and len(hidden) > 1:
            hidden = self._run_singly(hidden, positions, segments, begin, end, cache, aux)
            return hidden if keep is None else hidden[keep]
        if begin == end:
            aux.update({layer: hidden for layer in aux if layer == end})
            return hidden if keep is None else hidden[keep]
        if isinstance(self.layers, TorchLayers):
            self.layers.row_by_row = self.row_path is RowPath.ROW_ATTENTION
        return self.layers.run(hidden, self.rope.at(positions), segments, begin, end, cache, aux, keep)

    def _run_singly(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: KvCache,
        aux: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Every row in a pack of its own, in order: slow, and independent of its neighbours by construction."""
        results: list[torch.Tensor] = []
        found: dict[int, list[torch.Tensor]] = {layer: [] for layer in aux if begin <= layer <= end}
        for segment in segments:
            for row in range(segment.begin, segment.end):
                alone = (segment.part(row - segment.begin, row - segment.begin + 1, 0),)
                own = {layer: hidden[:0] for layer in found}
                one = slice(row, row + 1)
                results.append(self._run(hidden[one], positions[one], alone, begin, end, cache, own, None))
                for layer, state in own.items():
                    found[layer].append(state)
        aux.update({layer: torch.cat(states) for layer, states in found.items()})
        return torch.cat(results)


def _without_kept(segments: Sequence[Segment], kept: list[int]) -> tuple[list[int], tuple[Segment, ...]]:
    """Rows without a kept state, and their segments in a pack of their own."""
    rows: list[int] = []
    rest: list[Segment] = []
    done = 0
    for segment in segments:
        count = sum(segment.begin <= row < segment.end for row in kept[done : done + len(segment)])
        if kept[done : done + count] != list(range(segment.begin, segment.begin + count)):
            raise ValueError(f"kept rows {kept} are not the first of segment [{segment.begin}, {segment.end})")
        done += count
        if count < len(segment):
            begin = len(rows)
            rows.extend(range(segment.begin + count, segment.end))
            rest.append(segment.part(count, len(segment), begin))
    if done != len(kept):
        raise ValueError(f"kept rows {kept} are not ascending rows of this pack")
    return rows, tuple(rest)

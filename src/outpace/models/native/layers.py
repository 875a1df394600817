"""Decoder layers, embedding and output head on the native kernels: one call a step for all layers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outpace.errors import OutOfMemory
from outpace.kv.cache import KvCache
from outpace.models.config import DecoderConfig, ReadsPairs
from outpace.models.native.library import library
from outpace.models.native.matrix import PackedMatrices, Stored, bits_of, format_of
from outpace.models.native.pointers import address_of
from outpace.models.native.structures import (
    LayerStruct,
    RunStruct,
    SegmentStruct,
    ShapeStruct,
    path_lines,
    segment_struct,
)
from outpace.models.precision import Precision
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["NativeEmbedding", "NativeHead", "NativeLayers"]

_PROJECTIONS = (
    ("query", "self_attn.q_proj"),
    ("key", "self_attn.k_proj"),
    ("value", "self_attn.v_proj"),
    ("out", "self_attn.o_proj"),
    ("gate", "mlp.gate_proj"),
    ("up", "mlp.up_proj"),
    ("down", "mlp.down_proj"),
)


class NativeLayers:
    """`stack.LayerStack` on the native kernels.

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
        self._config = config
        self._pairs = pairs
        self._shape = ShapeStruct(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            wide=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            query_scale=config.head_dim**-0.5,
        )
        self._layers = (LayerStruct * len(prefixes))()
        self._kept: list[PackedMatrices | torch.Tensor] = []  # what the structures point to
        self._formats: set[int] = set()
        self.weight_bytes = 0
        for number, prefix in enumerate(prefixes):
            self._load(self._layers[number], weights, prefix, precision, config.windows[number])
            progress()
        self._pools: _Pools | None = None

    def _load(
        self, layer: LayerStruct, weights: WeightSource, prefix: str, precision: Precision, window: int | None
    ) -> None:
        config = self._config
        biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
        parts = []
        for _, name in _PROJECTIONS:
            stored = Stored.find(weights, f"{prefix}{name}.weight")
            has_bias = biased.get(name.split(".")[1][0], False) if "attn" in name else config.mlp_bias
            bias = weights.get(f"{prefix}{name}.bias") if has_bias else None
            parts.append((stored, format_of(precision, stored.source, blocks=stored.blocks), bias))
        packed = PackedMatrices(parts)
        self._kept.append(packed)
        self._formats.update(format for _, format, _ in parts)
        self.weight_bytes += packed.weight_bytes
        for (field, _), struct in zip(_PROJECTIONS, packed.structs, strict=True):
            setattr(layer, field, struct)
        layer.input_norm = self._vector(weights, f"{prefix}input_layernorm.weight", config.hidden_size)
        layer.mlp_norm = self._vector(weights, f"{prefix}post_attention_layernorm.weight", config.hidden_size)
        if config.qk_norm:
            layer.query_norm = self._vector(weights, f"{prefix}self_attn.q_norm.weight", config.head_dim)
            layer.key_norm = self._vector(weights, f"{prefix}self_attn.k_norm.weight", config.head_dim)
        if self._pairs is not None:
            layer.stream_norm = self._vector(weights, f"{prefix}hidden_norm.weight", config.hidden_size)
            layer.adds_to_normed = self._pairs.adds_to_normed
        layer.window = window or 0

    def _vector(self, weights: WeightSource, name: str, size: int) -> int:
        """Address of a norm's weight [size], which lives as long as the layers."""
        vector = weights.get(name).float().contiguous().clone()
        self._kept.append(vector)
        self.weight_bytes += vector.nbytes
        return address_of(vector, torch.float32, (size,))

    def describe(self) -> str:
        return " and ".join(bits_of(format) for format in sorted(self._formats))

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
        """See `stack.LayerStack.run`.

        Raises:
            ValueError: the cache's heads are not the model's, a slot to be written is not reserved, or a tensor is of
                another type or shape than `LayerStack.run` asks for.
            OutOfMemory: no memory for the rows of this pack.
        """
        pools = self._pools_of(cache)
        for segment in segments:
            cache.require(segment)
        lines = [path_lines(segment) for segment in segments]  # alive as long as the structures that point to them
        places = (SegmentStruct * len(segments))(*map(segment_struct, segments, lines))
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        rope = rope.contiguous()
        rows = len(hidden)
        run = RunStruct(
            shape=ctypes.addressof(self._shape),
            layers=ctypes.addressof(self._layers),
            begin=begin,
            end=end,
            rows=rows,
            segments=len(segments),
            capacity=cache.padded_capacity,
            threads=torch.get_num_threads(),
            hidden=address_of(hidden, torch.float32, (rows, self._shape.hidden)),
            turns=address_of(rope, torch.complex64, (rows, 1, self._shape.head_dim // 2)),
            segment=ctypes.addressof(places),
            keys=ctypes.addressof(pools.keys),
            values=ctypes.addressof(pools.values),
        )
        assert (beside is None) == (self._pairs is None), "layers that read pairs get them, and no others"
        if beside is not None:
            beside = beside.contiguous()
            run.beside = address_of(beside, torch.float32, (rows, self._shape.hidden))
        copies = {layer: torch.empty_like(hidden) for layer in aux if begin <= layer <= end}
        entering = (ctypes.c_void_p * (len(self._layers) + 1))() if copies else None
        if entering is not None:
            for layer, copy in copies.items():
                entering[layer] = address_of(copy, torch.float32)
            run.entering = ctypes.addressof(entering)
        if keep is not None:
            keep = keep.contiguous()
            run.keep, run.kept = address_of(keep, torch.int64) or ctypes.addressof(places), len(keep)
        if library().run_layers(ctypes.byref(run)):
            raise OutOfMemory(f"no memory is left to compute {rows} rows")
        aux.update(copies)
        if keep is None:
            return hidden
        return hidden[: len(keep)] if begin < end else hidden[keep]

    def _pools_of(self, cache: KvCache) -> _Pools:
        """Addresses of a cache's keys and values, a layer each."""
        pools = self._pools  # one attribute, so that two threads with two caches cannot mix them up
        if pools is None or pools.cache() is not cache:
            heads = (cache.num_kv_heads, cache.head_dim, cache.num_layers)
            if heads != (self._config.num_kv_heads, self._config.head_dim, len(self._layers)):
                raise ValueError(
                    f"a cache of {heads[0]} heads of {heads[1]} in {heads[2]} layers does not serve "
                    f"{self._config.num_kv_heads} of {self._config.head_dim} in {len(self._layers)}"
                )
            kind = ctypes.c_void_p * cache.num_layers
            layers = range(cache.num_layers)
            shape = (cache.num_lanes * cache.num_kv_heads, cache.padded_capacity, cache.head_dim)
            pools = _Pools(
                weakref.ref(cache),
                kind(*[address_of(cache.keys(layer), torch.float32, shape) for layer in layers]),
                kind(*[address_of(cache.values(layer), torch.float32, shape) for layer in layers]),
            )
            self._pools = pools
        return pools


@dataclass(frozen=True, slots=True)
class _Pools:
    """Where a cache keeps each layer's rows."""

    cache: weakref.ref[KvCache]
    keys: ctypes.Array[ctypes.c_void_p]
    values: ctypes.Array[ctypes.c_void_p]


class NativeHead:
    """`stack.Head` on the native kernels.

    Args:
        config: the decoder's shape.
        norm: [H] weight of the norm before the head.
        matrix: the head, packed alone.
        description: its precision, for people.
    """

    def __init__(self, config: DecoderConfig, norm: torch.Tensor, matrix: PackedMatrices, description: str) -> None:
        self._config = config
        self._norm = norm.float().contiguous().clone()
        self._matrix = matrix
        self._description = description
        self.weight_bytes = matrix.weight_bytes + self._norm.nbytes

    @classmethod
    def load(
        cls, config: DecoderConfig, weights: WeightSource, norm: str, name: str, vocab_size: int, precision: Precision
    ) -> NativeHead:
        """The head and its norm from these tensors, cut to `vocab_size` ids."""
        stored = Stored.find(weights, name, vocab_size)
        format = format_of(precision, stored.source, blocks=stored.blocks, head=True)
        return cls(config, weights.get(norm), PackedMatrices([(stored, format, None)]), bits_of(format))

    def with_norm(self, norm: torch.Tensor) -> NativeHead:
        """The same matrix, shared, behind another norm."""
        return NativeHead(self._config, norm, self._matrix, self._description)

    def describe(self) -> str:
        return self._description

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] float32 -> [N, V] float32.

        Raises:
            ValueError: `hidden` is of another type or width.
            OutOfMemory: no memory for so many rows.
        """
        struct = self._matrix.structs[0]
        hidden = hidden.contiguous()
        rows, width = len(hidden), self._config.hidden_size
        logits = torch.empty(rows, struct.outputs, dtype=torch.float32, device="cpu")
        failed = library().run_head(
            ctypes.c_void_p(address_of(self._norm, torch.float32, (width,))),
            ctypes.c_float(self._config.rms_norm_eps),
            ctypes.byref(struct),
            ctypes.c_void_p(address_of(hidden, torch.float32, (rows, width))),
            rows,
            ctypes.c_void_p(address_of(logits, torch.float32)),
            torch.get_num_threads(),
        )
        if failed:
            raise OutOfMemory(f"no memory is left to compute logits of {rows} rows")
        return logits


class NativeEmbedding:
    """`stack.Embedding` that stays as it is stored, in the file's own pages, of which a row is read now and then."""

    def __init__(self, weights: WeightSource, name: str) -> None:
        self._stored = Stored.find(weights, name)
        self.weight_bytes = 0 if self._stored.in_place else self._stored.data.nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[R] int64 -> [R, H] float32."""
        return self._stored.read_rows(ids.contiguous())

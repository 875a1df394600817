"""One transformer block of the Llama shape, in as few torch calls as it takes.

A step of a small model is bound by the number of calls (1 to 4 µs each), so projections are fused, the query scale
and the rotary order are folded into the weights at load, and a rotation is one complex product.

Elementwise kernels round their vectorised body and their scalar tail differently. Where the tail falls must not
depend on a row's neighbours, so the two kernels concerned (SiLU and the complex product) run over pieces that torch
does not split between threads, in views whose rows are not merged into one run of memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from outpace.kv.attention import AttentionPlan, attend
from outpace.kv.cache import KvCache
from outpace.models.config import DecoderConfig, ReadsPairs
from outpace.models.linear import pack_linear
from outpace.models.rope import interleaved
from outpace.models.weights import WeightSource

__all__ = ["Block", "RmsNorm"]

_PARALLEL_GRAIN = 32768
"""Elements from which torch splits an elementwise kernel between threads (`at::internal::GRAIN_SIZE`)."""


class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        weight: [D] or [groups, D], any float type.
        eps: added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._width = weight.shape[-1]
        self._eps = eps
        # (x, -x) has mean zero and variance mean(x²): its layer norm is the RMS norm, at half the time of torch's own.
        grouped = weight.dim() > 1
        self._inner = None if grouped else F.pad(weight.float(), (0, self._width))
        self._outer = weight.float().contiguous() if grouped else None
        self.weight_bytes = 4 * weight.numel() * (1 if grouped else 2)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., D] float32 -> the same; a view into a wider tensor unless the weight has groups."""
        mirrored = torch.cat((rows, rows.neg()), -1)
        normed: torch.Tensor = torch.native_layer_norm(mirrored, [2 * self._width], self._inner, None, self._eps)[0]
        normed = normed.narrow(-1, 0, self._width)
        return normed if self._outer is None else normed * self._outer


class Block:
    """Attention and MLP of one layer, each on a normalised copy of the stream and added back to it.

    Usable alone with a one-layer cache.

    Args:
        config: the decoder's shape.
        weights: where its tensors are.
        prefix: what their names begin with, as "model.layers.0.".
        quantization: "int8" or "none".
        pairs: it reads pairs; see `stack.load_layers`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        prefix: str,
        quantization: str,
        pairs: ReadsPairs | None = None,
    ) -> None:
        self._pairs = pairs
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads
        self._turned = config.num_heads + config.num_kv_heads  # heads the rotary embedding turns: query, then key
        self._wide = config.intermediate_size
        self._qk_norm = _load_qk_norm(config, weights, prefix) if config.qk_norm else None
        self._input_norm = RmsNorm(weights.get(f"{prefix}input_layernorm.weight"), config.rms_norm_eps)
        self._stream_norm = (
            None if pairs is None else RmsNorm(weights.get(f"{prefix}hidden_norm.weight"), config.rms_norm_eps)
        )
        self._mlp_norm = RmsNorm(weights.get(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps)
        self._qkv = pack_linear(
            _fuse_qkv(config, weights, f"{prefix}self_attn.", "weight"),
            _fuse_qkv(config, weights, f"{prefix}self_attn.", "bias") if config.qkv_bias else None,
            quantization,
        )
        self._out = pack_linear(
            weights.get(f"{prefix}self_attn.o_proj.weight"),
            weights.get(f"{prefix}self_attn.o_proj.bias") if config.o_bias else None,
            quantization,
        )
        self._gate_up = pack_linear(
            _fuse(weights, (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")),
            _fuse(weights, (f"{prefix}mlp.gate_proj.bias", f"{prefix}mlp.up_proj.bias")) if config.mlp_bias else None,
            quantization,
        )
        self._down = pack_linear(
            weights.get(f"{prefix}mlp.down_proj.weight"),
            weights.get(f"{prefix}mlp.down_proj.bias") if config.mlp_bias else None,
            quantization,
        )
        self.description = self._qkv.describe()
        parts = (self._qkv, self._out, self._gate_up, self._down, self._input_norm, self._mlp_norm)
        self.weight_bytes = sum(part.weight_bytes for part in parts)
        self.weight_bytes += 0 if self._stream_norm is None else self._stream_norm.weight_bytes

    def __call__(
        self,
        hidden: torch.Tensor,
        rope: torch.Tensor,
        plan: AttentionPlan,
        cache: KvCache,
        layer: int,
        keep: torch.Tensor | None = None,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the block and writes its keys and values to the cache.

        Args:
            hidden: [R, H] float32, states entering the block; not changed.
            rope: [R, 1, D/2] complex64 from `RopeTable.at`.
            plan: attention over these rows' segments, with this layer's window.
            cache: where keys and values live.
            layer: the cache's layer to use.
            keep: [N] int64 rows whose result is wanted; all are written to the cache. None is all.
            beside: [R, H] what a block that reads pairs reads beside the stream; None for others.

        Returns:
            [R, H], or [N, H] with `keep`.
        """
        read, hidden = self._read(hidden, beside)
        query, key, value = self._heads(self._qkv(read), rope)
        mixed = attend(plan, cache, layer, query, key, value)
        if keep is not None:
            if not len(keep):
                return hidden[:0]
            hidden, mixed = hidden.index_select(0, keep), mixed.index_select(0, keep)
        hidden = self._out.add_to(hidden, mixed)
        return self._down.add_to(hidden, _gated(self._gate_up(self._mlp_norm(hidden)), self._wide))

    def _read(self, hidden: torch.Tensor, beside: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the stream that its result is added to."""
        if self._pairs is None or self._stream_norm is None or beside is None:
            assert self._pairs is None and beside is None, "blocks that read pairs get them, and no others"
            return self._input_norm(hidden), hidden
        normed = self._stream_norm(hidden)
        return torch.cat((self._input_norm(beside), normed), -1), normed if self._pairs.adds_to_normed else hidden

    def _heads(self, qkv: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[R, all heads * D] -> scaled and turned query [R, heads, D], turned key, value [R, kv heads, D]."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        turned = heads.narrow(1, 0, self._turned)
        if self._qk_norm is not None:
            turned = self._qk_norm(turned)
        turned = _rotated(turned.view(torch.complex64), rope).view(torch.float32)
        num_kv_heads = self._turned - self._num_heads
        return (
            turned.narrow(1, 0, self._num_heads),
            turned.narrow(1, self._num_heads, num_kv_heads),
            heads.narrow(1, self._turned, num_kv_heads),
        )


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows small enough that torch computes each in one thread."""
    step = max(1, (_PARALLEL_GRAIN - 1) // width)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _rotated(heads: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """[R, heads, D/2] complex times [R, 1, D/2]."""
    width = heads.shape[1] * heads.shape[2]
    if len(heads) * width < _PARALLEL_GRAIN:
        return heads * rope
    result = torch.empty_like(heads, memory_format=torch.contiguous_format)
    for piece in _pieces(len(heads), width):
        torch.mul(heads[piece], rope[piece], out=result[piece])
    return result


def _gated(gate_up: torch.Tensor, width: int) -> torch.Tensor:
    """silu(gate) * up of [R, 2 * width] -> [R, width]."""
    gate, up = gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)
    if len(gate) * width < _PARALLEL_GRAIN:
        return F.silu(gate).mul_(up)
    result = gate.new_empty(len(gate), width)
    for piece in _pieces(len(gate), width):
        torch.mul(F.silu(gate[piece]), up[piece], out=result[piece])
    return result


def _fuse(weights: WeightSource, names: tuple[str, ...]) -> torch.Tensor:
    return torch.cat([weights.get(name) for name in names])


def _fuse_qkv(config: DecoderConfig, weights: WeightSource, prefix: str, kind: str) -> torch.Tensor:
    """Query, key and value rows as one float32 matrix (or bias): rotary partners side by side, query scaled."""
    query = interleaved(weights.get(f"{prefix}q_proj.{kind}").float(), config.head_dim)
    if not config.qk_norm:
        query = query * config.head_dim**-0.5
    key = interleaved(weights.get(f"{prefix}k_proj.{kind}").float(), config.head_dim)
    return torch.cat((query, key, weights.get(f"{prefix}v_proj.{kind}").float()))


def _load_qk_norm(config: DecoderConfig, weights: WeightSource, prefix: str) -> RmsNorm:
    """Head norm of all query heads (with the query scale), then all key heads."""
    query = interleaved(weights.get(f"{prefix}self_attn.q_norm.weight").float(), config.head_dim)
    key = interleaved(weights.get(f"{prefix}self_attn.k_norm.weight").float(), config.head_dim)
    scaled = (query * config.head_dim**-0.5).expand(config.num_heads, -1)
    return RmsNorm(torch.cat((scaled, key.expand(config.num_kv_heads, -1))), config.rms_norm_eps)

"""An EAGLE-3 head in a few lines of torch, straight from its formulas: slow, without a cache, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from outpace.heads import Eagle3Config
from outpace.models.rope import inverse_frequencies

Tensors = Mapping[str, torch.Tensor]


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def fuse(config: Eagle3Config, tensors: Tensors, states: torch.Tensor) -> torch.Tensor:
    """[R, aux layers * Ht] -> [R, H]."""
    eps = config.layer.rms_norm_eps
    if config.fc_norm:
        parts = states.chunk(config.num_aux, -1)
        states = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    if config.norm_before_fc:
        states = norm(states, tensors["input_norm.weight"], eps)
    return F.linear(states, tensors["fc.weight"], tensors.get("fc.bias"))


def turned(heads: torch.Tensor, positions: torch.Tensor, config: Eagle3Config) -> torch.Tensor:
    """[R, heads, D] turned by their positions: dimension i with i + D / 2."""
    frequencies, scale = inverse_frequencies(config.layer.rope, config.layer.head_dim)
    angles = (positions[:, None].float() * frequencies)[:, None]
    cos, sin = angles.cos().double() * scale, angles.sin().double() * scale
    low, high = heads.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def run(
    config: Eagle3Config,
    tensors: Tensors,
    embedded: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, H] of embeddings and features, and which rows [R, R] each sees -> draft logits and next features."""
    layer, eps = config.layer, config.layer.rms_norm_eps
    own = {name.removeprefix("midlayer."): each for name, each in tensors.items() if name.startswith("midlayer.")}

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, own[f"{name}.weight"], own.get(f"{name}.bias"))

    normed = norm(features, own["hidden_norm.weight"], eps)
    read = torch.cat([norm(embedded, own["input_layernorm.weight"], eps), normed], -1)
    stream = normed if config.norm_before_residual else features
    heads = {
        each: product(f"self_attn.{each}_proj", read).view(len(read), -1, layer.head_dim) for each in ("q", "k", "v")
    }
    if layer.qk_norm:
        heads |= {each: norm(heads[each], own[f"self_attn.{each}_norm.weight"], eps) for each in ("q", "k")}
    heads |= {each: turned(heads[each], positions, config) for each in ("q", "k")}
    group = layer.num_heads // layer.num_kv_heads
    query, key, value = heads["q"], *(heads[each].repeat_interleave(group, 1) for each in ("k", "v"))
    scores = torch.einsum("rhd,shd->hrs", query, key) / layer.head_dim**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = torch.einsum("hrs,shd->rhd", weights, value).reshape(len(read), -1)
    stream = stream + product("self_attn.o_proj", mixed)
    rows = norm(stream, own["post_attention_layernorm.weight"], eps)
    stream = stream + product("mlp.down_proj", F.silu(product("mlp.gate_proj", rows)) * product("mlp.up_proj", rows))
    last = norm(stream, tensors["norm.weight"], eps)
    return F.linear(last, tensors["lm_head.weight"]), last if config.norm_output else stream

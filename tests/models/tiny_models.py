"""Tiny random checkpoints of every architecture the decoder runs, and packs to run them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from outpace.kv.cache import KvCache
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.precision import Precision
from outpace.models.stored import QuantizedBlocks
from outpace.types import Pack, Segment

SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 16},
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral-window": {"model_type": "mistral", "sliding_window": 16},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN_ROPE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


class DictWeights:
    """A checkpoint held in a dictionary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def blocks(self, name: str) -> QuantizedBlocks | None:
        if name not in self._tensors:
            raise KeyError(name)
        return None


PRECISIONS = ("none", "int8", "int4", "torch none", "torch int8")
"""Tests' words for the kernels and numbers that a decoder may run on."""
_DTYPES = ("float32", "float16", "bfloat16")


def precision(name: str) -> Precision:
    """A precision by a test's word for it: "int8" or "float16" of the native kernels, "torch int8" of torch's."""
    kernels, _, quantization = name.rpartition(" ")
    dtype = quantization if quantization in _DTYPES else "auto"
    return Precision("none" if dtype != "auto" else quantization, dtype, kernels or "native")


def reference_model(variant: str, **changes: Any) -> Any:
    """transformers' own model, random weights with every bias and norm away from its initial value."""
    settings = {**SIZES, **VARIANTS[variant], **changes}
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.1))
    return model.requires_grad_(False)


def tiny_weights(model: Any) -> DictWeights:
    tied = model.config.tie_word_embeddings
    return DictWeights({k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")})


def tiny_decoder(variant: str, quantization: str = "none", **changes: Any) -> Decoder:
    model = reference_model(variant, **changes)
    return Decoder(
        DecoderConfig.from_hf(model.config.to_dict()), tiny_weights(model), precision=precision(quantization)
    )


def lanes(decoder: Decoder, count: int, rows: int) -> KvCache:
    """A cache with lanes 0..count-1 allocated and `rows` rows reserved in each."""
    cache = decoder.new_cache(count, rows, count * rows)
    for lane in range(count):
        assert cache.allocate() == lane
        assert cache.reserve(lane, rows)
    return cache


def pack_of(
    *parts: tuple[int, int, Sequence[int]], logits_rows: Sequence[int] | None = None, aux_layers: tuple[int, ...] = ()
) -> Pack:
    """A pack of (lane, first slot, ids) parts; logits of every row unless told otherwise."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for lane, first, tokens in parts:
        segments.append(Segment(lane, len(ids), len(ids) + len(tokens), first))
        ids.extend(tokens)
        positions.extend(range(first, first + len(tokens)))
    wanted = range(len(ids)) if logits_rows is None else logits_rows
    return Pack(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        segments=tuple(segments),
        logits_rows=torch.tensor(list(wanted), dtype=torch.long),
        aux_layers=aux_layers,
    )


def random_ids(count: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

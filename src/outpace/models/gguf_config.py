"""From a GGUF file's metadata and tensor names to a config and names as Hugging Face writes them.

Keys and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.gguf_file import GgufFile

__all__ = ["ARCHITECTURES", "build_config", "name_tensors", "restore_rows"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architectures that can be converted. Mistral and SmolLM2 files call themselves llama."""

# Factors on the rotary frequencies; they go into the config.
_ROPE_FACTORS = "rope_freqs.weight"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_CONTROL = 3


def name_tensors(file: GgufFile) -> dict[str, str]:
    """Hugging Face's name for every tensor that is stored converted, by the name in the file.

    Raises:
        CheckpointError: naming a tensor that has no place in these architectures.
    """
    names = {}
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block and block[2] in _INNER:
            names[name] = f"model.layers.{block[1]}.{_INNER[block[2]]}.{kind}"
        elif stem in _OUTER:
            names[name] = f"{_OUTER[stem]}.{kind}"
        elif name != _ROPE_FACTORS:
            architecture = file.metadata.get("general.architecture")
            raise CheckpointError(f"{file.path}: tensor {name!r} has no place in architecture {architecture!r}")
    return names


def restore_rows(file: GgufFile, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Undoes the reordering that GGUF files of architecture llama have in the rows of q and k.

    They keep the two halves that the rotary embedding pairs next to each other, row by row; Hugging Face keeps
    each half together.

    Args:
        file: where the tensor comes from.
        name: its name there.
        tensor: [rows, ...] in the file's order: values, or bytes of blocks (no block goes beyond its row).

    Raises:
        CheckpointError: the rows cannot be shared out over the heads.
    """
    kind = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(weight|bias)", name)
    if file.metadata["general.architecture"] != "llama" or not kind:
        return tensor
    heads = _number(file, "attention.head_count" if kind[1] == "q" else "attention.head_count_kv")
    rest = tensor.shape[1:]
    if heads < 1 or len(tensor) % (2 * heads):
        raise CheckpointError(f"{file.path}: tensor {name!r} has {len(tensor)} rows, not possible for {heads} heads")
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest)


def build_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` this file describes.

    Raises:
        UnsupportedModel: another architecture, experts, or layers that differ from each other.
        CheckpointError: a key or tensor that must be there is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} has architecture {architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} can be read"
        )
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which outpace does not run")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor 'token_embd.weight': no language model, or incomplete")
    heads, hidden = _number(file, "attention.head_count"), _number(file, "embedding_length")
    window = file.metadata.get(f"{architecture}.attention.sliding_window", 0)
    config = {
        "architectures": ["MistralForCausalLM" if window and architecture == "llama" else ARCHITECTURES[architecture]],
        "model_type": "mistral" if window and architecture == "llama" else architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": _number(file, "attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(_number(file, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": _number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file),
        "dtype": "float16",
    }
    if window:
        config["sliding_window"] = window
    rope = _rope(file, config)
    return {**config, "rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _number(file: GgufFile, key: str, default: int | None = None) -> Any:
    architecture = file.metadata["general.architecture"]
    value = file.metadata.get(f"{architecture}.{key}", default)
    if value is None:
        raise CheckpointError(f"{file.path} lacks the metadata {architecture}.{key}: incomplete or not a model")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} differs from layer to layer: {value[:4]}...")
        value = value[0]
    return value


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_ids(file: GgufFile) -> list[int]:
    """Ids that end generation.

    A GGUF names one EOS id, while the originals' generation configs often name several, so control tokens that
    models of these families end a turn or a document with count too (as llama.cpp does).
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = {int(file.metadata[f"tokenizer.ggml.{key}"]) for key in keys if f"tokenizer.ggml.{key}" in file.metadata}
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    control = (index for index, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
    return sorted(named.union(index for index in control if tokens[index] in _END_TOKENS))


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    theta = _shortest(_number(file, "rope.freq_base", 10000))
    if _number(file, "rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{file.path} rotates a part of each head only, which outpace does not run")
    base = {"rope_type": "default", "rope_theta": theta}
    if _ROPE_FACTORS in file.tensors:
        stored = file.read_rows(file.tensors[_ROPE_FACTORS], 0, 1)[0]
        return {**base, **_fit_factors(file, stored.tolist(), theta)}
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if kind == "none":
        return base
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} scales its rotary embedding by {kind!r}; linear and yarn can be read")
    scaling = {**base, "rope_type": kind, "factor": _shortest(_number(file, "rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _number(file, "rope.scaling.original_context_length")
    return scaling


def _fit_factors(file: GgufFile, factors: list[float], theta: float) -> dict[str, Any]:
    """Finds the Llama 3.1 scaling that stored frequency factors came from (the file keeps only the result).

    Its parameters are low 1, high 4 and the context it was first trained with, 8192, in every published model; the
    factor is the largest of the list.
    """
    factor, original, low, high = round(max(factors)), 8192, 1.0, 4.0
    expected = []
    for index in range(len(factors)):
        wavelength = 2 * math.pi * theta ** (index / len(factors))
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            expected.append(1.0)
        elif wavelength > original / low:
            expected.append(float(factor))
        else:
            expected.append(1 / ((1 - smooth) / factor + smooth))
    if any(abs(mine - theirs) > 1e-4 * theirs for mine, theirs in zip(expected, factors, strict=True)):
        raise UnsupportedModel(f"{file.path}: its rope_freqs.weight follow no scaling that outpace knows (Llama 3.1's)")
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

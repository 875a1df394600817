"""Tiny GGUF files, written with the gguf package: a random Llama-shaped model and a small tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_level_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: three control tokens, the 256 bytes, `he`, `ll`, `hell`, padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["he", "ll", "hell"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *merged]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    padding = [f"[PAD{len(tokens) + number}]" for number in range(2)]
    return tokens + padding, [*map(int, kinds), *[int(gguf.TokenType.UNUSED)] * 2], ["h e", "l l", "he ll"]


def original_weights(vocab_size: int, *, tied: bool, architecture: str = "llama", seed: int = 0) -> dict[str, Any]:
    """Random weights by Hugging Face name, float32, every value exact in float16."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return (random.integers(-64, 64, shape) / 256).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(vocab_size, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", WIDE, HIDDEN),
            ("mlp.up_proj", WIDE, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDE),
        ):
            weights[f"{at}{name}.weight"] = draw(rows, columns)
            if architecture == "qwen2" and name.split(".")[1][0] in "qkv":
                weights[f"{at}{name}.bias"] = draw(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = draw(HIDDEN)
        if architecture == "qwen3":
            weights[f"{at}self_attn.q_norm.weight"] = draw(HEAD_DIM)
            weights[f"{at}self_attn.k_norm.weight"] = draw(HEAD_DIM)
    if not tied:
        weights["lm_head.weight"] = draw(vocab_size, HIDDEN)
    return weights


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = False,
    weights: Mapping[str, Any] | None = None,
    quantize: gguf.GGMLQuantizationType | None = None,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a small model as llama.cpp's converter would, and returns its weights by Hugging Face name.

    Args:
        path: the file.
        architecture: llama, qwen2 or qwen3.
        tied: no output head of its own.
        weights: instead of random ones.
        quantize: block format of the matrices; None keeps float32.
        extra: further tensors, by their name in the file.
        metadata: keys that replace or join the usual ones; a value of None removes one.
    """
    tokens, kinds, merges = byte_level_vocabulary()
    weights = dict(weights or original_weights(len(tokens), tied=tied, architecture=architecture))
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": WIDE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **(metadata or {}),
    }
    for key, value in values.items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    for name, value in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            value = pair_halves(value, HEADS if "q_proj" in name else KV_HEADS)
        if quantize is not None and value.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(stored, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def pair_halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of q and k in llama files: row i of a head's first half, then row i of its second half."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for index in range(size // 2):
            out[head * size + 2 * index] = rows[head * size + index]
            out[head * size + 2 * index + 1] = rows[head * size + size // 2 + index]
    return out


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

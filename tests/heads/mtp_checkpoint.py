"""A small MiMo-like checkpoint whose MTP layer is often right: layers behind the first only nudge the stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny_tokenizers import byte_level

KEYS: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
MTP = "model.mtp_layers.0."


def mimo_tensors() -> dict[str, torch.Tensor]:
    """All tensors, by the names that they have in MiMo's checkpoints."""
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    found = {"model.embed_tokens.weight": random(300, 64), "lm_head.weight": random(300, 64)}
    found["model.norm.weight"] = 1 + random(64, scale=0.1)
    for layer in range(3):
        prefix, nudge = f"model.layers.{layer}.", 0.03 if layer else 0.25
        for name, outputs in (("q", 64), ("k", 32), ("v", 32)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = random(outputs, 64)
            found[f"{prefix}self_attn.{name}_proj.bias"] = random(outputs, scale=0.1)
        found[f"{prefix}self_attn.o_proj.weight"] = random(64, 64, scale=nudge)
        found[f"{prefix}mlp.gate_proj.weight"] = random(96, 64)
        found[f"{prefix}mlp.up_proj.weight"] = random(96, 64)
        found[f"{prefix}mlp.down_proj.weight"] = random(64, 96, scale=nudge)
        found[f"{prefix}input_layernorm.weight"] = 1 + random(64, scale=0.1)
        found[f"{prefix}post_attention_layernorm.weight"] = 1 + random(64, scale=0.1)
    first, eye = "model.layers.0.", torch.eye(64)
    own = {MTP + name.removeprefix(first): each.clone() for name, each in found.items() if name.startswith(first)}
    own[f"{MTP}token_layernorm.weight"] = own[f"{MTP}hidden_layernorm.weight"] = torch.ones(64)
    own[f"{MTP}input_proj.weight"] = torch.cat([0.01 * eye, 0.25 * eye], 1)
    own[f"{MTP}final_layernorm.weight"] = found["model.norm.weight"].clone()
    return {**found, **{name: each.clone() for name, each in own.items()}}


def write_mimo(folder: Path, *, tensors: Mapping[str, torch.Tensor | None] | None = None, **keys: Any) -> Path:
    """The checkpoint with some tensors and keys changed; None takes one out."""
    folder.mkdir()
    found = {**mimo_tensors(), **(tensors or {})}
    save_file({name: each for name, each in found.items() if each is not None}, str(folder / "model.safetensors"))
    kept = {key: value for key, value in {**KEYS, **keys}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def without_mtp(folder: Path) -> Path:
    """Takes the MTP layer out of the weights, as converted copies do; config.json still names it."""
    found = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in found.items() if not name.startswith(MTP)}
    save_file(kept, str(folder / "model.safetensors"))
    return folder

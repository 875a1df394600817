"""Tiny random models of many architectures of transformers, with every bias and norm away from its initial value."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB, POSITIONS, WINDOW = 97, 320, 16

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
}
_GPT: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS, "vocab_size": VOCAB}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MLA: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
RIGHT: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 8},
    "codegen": {**_GPT, "rotary_dim": 8},
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 90, "word_embed_proj_dim": 48},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "olmo": {},
    "olmo2": {},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW},
    "granite": {"attention_multiplier": 0.3},
    "starcoder2": {"sliding_window": WINDOW},
    "biogpt": {},
    "diffllama": {},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": WINDOW},
    "qwen2_moe": _EXPERTS,
    "gpt_oss": {
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
    },
    "deepseek_v3": _MLA,
    "qwen3": {"head_dim": 16},
}
"""Models that must be right."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "no position_ids"),
    "mpt": ({"d_model": 48, "n_heads": 4, "n_layers": 3}, "no position_ids"),
    "falcon": ({}, "0 of its 3 layers call the attention"),
    "xglm": ({"d_model": 48, "ffn_dim": 90, "num_layers": 3, "attention_heads": 4}, "0 of its 3 layers call"),
    "gpt_neo": (
        {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]},
        "0 of its 3",
    ),
    "doge": ({}, "layer 0 makes an attention mask of its own"),
    "llama4_text": (
        {"intermediate_size_mlp": 90, "num_local_experts": 2, "head_dim": 16, "attention_chunk_size": 16},
        "layers of type chunked_attention",
    ),
    "mamba": ({}, "layers of type linear_attention"),
    "rwkv": ({"attention_hidden_size": 48}, "layers of type Rwkv"),
    "recurrent_gemma": ({"lru_width": 48, "attention_window_size": 16}, "layers of type linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "layers of type conv"),
    "jamba": ({"use_mamba_kernels": False, "num_experts": 2}, "layers of type linear_attention"),
    "falcon_h1": ({}, "layers of type hybrid"),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_EXPERTS, "head_dim": 16},
        "layers of type linear_attention",
    ),
    "granitemoehybrid": (
        {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 12},
        "layers of type linear_attention",
    ),
    "bert": ({}, "not causal"),
}
"""Models that must be refused, and a part of the message."""


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in evaluation mode with weights large enough that attention decides what comes out."""
    settings = {**_SIZES, **(RIGHT[kind] if kind in RIGHT else REFUSED.get(kind, ({}, ""))[0]), **changes}
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.requires_grad_(False).to(dtype)


def eager_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[R, V] of a whole text, by the model itself with attention written out and no cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    model.set_attn_implementation(before)
    return logits

"""A checkpoint's MTP layer straight from its definition, slow, in float64: transformers' own Qwen2 layer in the middle.

DeepSeek-AI 2412.19437, equations 21 to 23, in the order of MiMo (2505.07608): the state first, then the next token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from outpace.models.config import DecoderConfig
from tests.models.tiny_models import SIZES, DictWeights, reference_model, tiny_weights

EPS = 1e-5


def tiny_target() -> Any:
    """transformers' model of the tiny target's weights; the Qwen2 that a MiMo is without its MTP layer."""
    return reference_model("qwen2", rms_norm_eps=EPS).double()


def target_weights() -> DictWeights:
    return tiny_weights(reference_model("qwen2", rms_norm_eps=EPS))


def config_keys(**changes: Any) -> dict[str, Any]:
    """Its config.json, as MiMo's is."""
    found = reference_model("qwen2", rms_norm_eps=EPS).config.to_dict()
    kept = {key: found[key] for key in ("rope_parameters", "hidden_act", *SIZES) if key in found}
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return {**kept, **own, "rms_norm_eps": EPS, **changes}


def shape() -> DecoderConfig:
    return DecoderConfig.from_hf(config_keys())


def tiny_tensors(seed: int = 5) -> dict[str, torch.Tensor]:
    """Random weights of an MTP layer, by the names that they have in checkpoints, without prefix; written by hand."""
    generator = torch.Generator().manual_seed(seed)
    hidden, wide = SIZES["hidden_size"], SIZES["intermediate_size"]
    keys = hidden // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    shapes: dict[str, Sequence[int]] = {
        "token_layernorm.weight": [hidden],
        "hidden_layernorm.weight": [hidden],
        "input_proj.weight": [hidden, 2 * hidden],
        "final_layernorm.weight": [hidden],
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [hidden, hidden],
        "self_attn.q_proj.bias": [hidden],
        "self_attn.k_proj.weight": [keys, hidden],
        "self_attn.k_proj.bias": [keys],
        "self_attn.v_proj.weight": [keys, hidden],
        "self_attn.v_proj.bias": [keys],
        "self_attn.o_proj.weight": [hidden, hidden],
        "mlp.gate_proj.weight": [wide, hidden],
        "mlp.up_proj.weight": [wide, hidden],
        "mlp.down_proj.weight": [hidden, wide],
    }
    noise = {name: torch.randn(*size, generator=generator) for name, size in shapes.items()}
    return {name: 1 + 0.3 * each if "norm" in name else 0.25 * each for name, each in noise.items()}


class PlainMtp:
    """It, on a target of transformers."""

    def __init__(self, target: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        config = target.config
        self._target = target
        self._rope = Qwen2RotaryEmbedding(config)
        self._layer = Qwen2DecoderLayer(config, 0).double().eval().requires_grad_(False)
        inner = self._layer.state_dict()
        self._layer.load_state_dict({name: tensors[name].double() for name in inner})
        self._enter = tensors["input_proj.weight"].double()
        self._norms = {}
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            self._norms[name] = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps).double().requires_grad_(False)
            self._norms[name].weight.copy_(tensors[f"{name}.weight"])
        assert len(tensors) == len(inner) + 4

    def rows(
        self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] next tokens and [R, H] states of one text, in order -> [R, V] logits, [R, H] outputs."""
        embedded = self._target.model.embed_tokens(ids)
        stream = torch.cat([self._norms["hidden_layernorm"](states), self._norms["token_layernorm"](embedded)], -1)
        stream = (stream @ self._enter.T)[None]
        mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)
        turns = self._rope(stream, positions[None])
        out = self._layer(stream, attention_mask=mask, position_embeddings=turns, position_ids=positions[None])
        last = self._norms["final_layernorm"](out[0] if isinstance(out, tuple) else out).view(len(ids), -1)
        return self._target.lm_head(last), last

    def chain(self, text: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """[len(drafted), V] logits behind the text and each of the drafted tokens but the last."""
        states = last_states(self._target, text)[:-1]
        ids, found = list(text), []
        for token in drafted:
            logits, outputs = self.rows(torch.tensor(ids[1:]), states, torch.arange(len(ids) - 1))
            found.append(logits[-1])
            ids.append(token)
            states = torch.cat([states, outputs[-1:]])
        return torch.stack(found)


@torch.no_grad()
def last_states(target: Any, text: Sequence[int]) -> torch.Tensor:
    """[len(text), H] what enters the target's final norm."""
    seen: list[torch.Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    target(torch.tensor([list(text)]))
    handle.remove()
    return seen[0]

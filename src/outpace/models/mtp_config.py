"""The multi-token-prediction layer (MTP) that a checkpoint carries behind its decoder. Never imports torch.

DeepSeek-AI 2412.19437, section 2.2; Xiaomi 2505.07608. One decoder layer that reads the state of a position and the
token after it, and guesses the token after that:

    state of position i          h = what leaves the target's last layer, before its final norm     [H]
    stream                       x = input_proj(cat(hidden_layernorm(h), token_layernorm(embed(t_i+1))))
    layer                        an ordinary one of the target's shape, over the x of all positions up to i
    guess at t_i+2               lm_head(y), y = final_layernorm(output); embed and lm_head are the target's
    to guess on                  the same layer again, on y and t_i+2

A layer that only guesses one token was trained so; its further guesses are good for what they are good for. The order
of the two halves is the one in which MiMo's checkpoints are stored; other families turn it round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from outpace.models.config import DecoderConfig, expected_tensors

__all__ = ["MTP_TYPES", "layer_tensors", "mtp_layer", "mtp_prefix", "mtp_tensors", "names_mtp_layers", "stores_mtp"]

MTP_TYPES = ("mimo",)
"""`model_type` of the checkpoints whose MTP layer is run."""
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")


def mtp_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.mtp_layers.{layer}."


def mtp_layer(config: DecoderConfig) -> DecoderConfig:
    """The shape of an MTP layer as a decoder of its own: it sees all positions, also where the target's do not."""
    return replace(config, num_layers=1, windows=(None,), mtp_layers=0)


def layer_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one layer, without prefix."""
    hidden, first = config.hidden_size, "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "final_layernorm.weight": (hidden,),
    }
    for name, shape in expected_tensors(mtp_layer(config)).items():
        if name.startswith(first):
            shapes[name.removeprefix(first)] = shape
    return shapes


def mtp_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors that such a checkpoint may hold beside those of its decoder."""
    return {
        mtp_prefix(layer) + name: shape
        for layer in range(config.mtp_layers)
        for name, shape in layer_tensors(config).items()
    }


def stores_mtp(config: DecoderConfig, stored: Iterable[str]) -> bool:
    """Whether an MTP layer that can be run is among the tensors of these names; a converted copy may have lost it."""
    return config.mtp_layers == 1 and any(name.startswith(mtp_prefix(0)) for name in stored)


def names_mtp_layers(keys: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json, of whatever family, says that MTP layers come with the weights."""
    inner = keys.get("text_config")
    places = [keys, inner] if isinstance(inner, Mapping) else [keys]
    return any(isinstance(place.get(key), int) and place[key] > 0 for place in places for key in _COUNTS)

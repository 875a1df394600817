"""An MTP layer for a tiny target that is often right and sometimes wrong, made by hand.

The target's layers from the second on only nudge the stream, so what the first makes of the text is nearly the answer.
The MTP layer is that one, over embeddings that come in beside a trace of the state.
"""

from __future__ import annotations

import functools

import torch

from outpace.models.config import DecoderConfig
from outpace.models.mtp import MtpHead
from outpace.models.mtp_config import mtp_layer
from tests.models.tiny_models import SIZES, DictWeights

from . import tiny
from .tiny_head import NUDGED_FROM

H = SIZES["hidden_size"]
TRACE = 0.02


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    target = tiny.tensors(NUDGED_FROM)
    first, eye, ones = "model.layers.0.", torch.eye(H), torch.ones(H)
    size = target["model.embed_tokens.weight"].pow(2).mean().sqrt()
    return {
        **{name.removeprefix(first): each for name, each in target.items() if name.startswith(first)},
        "token_layernorm.weight": ones,
        "hidden_layernorm.weight": ones,
        "input_proj.weight": torch.cat([TRACE * eye, size * eye], 1),
        "final_layernorm.weight": target["model.norm.weight"],
    }


def head(words: str) -> MtpHead:
    layer = mtp_layer(DecoderConfig.from_hf({"model_type": "llama", **SIZES}))
    return MtpHead(tiny.target(words, NUDGED_FROM), layer, DictWeights(weights()))

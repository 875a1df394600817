"""An EAGLE-3 head for a tiny target that is often right and sometimes wrong, made by hand.

The target's layers from the second on only nudge the stream, so what the first makes of the text is nearly the answer.
The head's layer is that one, on the embeddings it reads, with one more attention head: its rows look at their own token
only (no other has so high a score with it), put the token's embedding into the stream, and take the feature out of it.
"""

from __future__ import annotations

import functools

import torch

from outpace.heads import Eagle3Config, offsets_of, token_ids_of
from outpace.models.config import DecoderConfig
from outpace.models.eagle3 import Eagle3Head
from tests.models.tiny_models import SIZES, DictWeights, precision

from . import tiny

NUDGED_FROM = 1
"""First layer of the target that only nudges."""
AUX_LAYERS = (1, 2, 3)
H, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]
HEADS, KV_HEADS = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
OLD_DIM = H // HEADS
GROUP = HEADS // KV_HEADS
LEFT_OUT = 7
"""Every so many tokens the head cannot guess."""


@functools.cache
def config() -> Eagle3Config:
    own = {"num_hidden_layers": 1, "num_key_value_heads": KV_HEADS + 1, "num_attention_heads": HEADS + GROUP}
    return Eagle3Config(
        DecoderConfig.from_hf({**SIZES, **own, "head_dim": H, "model_type": "llama"}),
        target_hidden_size=H,
        draft_vocab_size=VOCAB - len(range(0, VOCAB, LEFT_OUT)),
        aux_layers=AUX_LAYERS,
        norm_before_residual=True,
        shares_target_head=True,
    )


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """[heads * OLD_DIM, H] of a query or key projection -> [heads * H, H] with the same turns at the same positions.

    A wide head has the frequencies of a narrow one among its own, every HEADS-th of them.
    """
    heads = rows.view(-1, 2, OLD_DIM // 2, H)
    wide = torch.zeros(len(heads), 2, H // 2, H)
    wide[:, :, ::HEADS] = heads
    return wide.reshape(-1, H)


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """Its tensors, `d2t` among them."""
    target = tiny.tensors(NUDGED_FROM)
    layer = {n.removeprefix("model.layers.0."): t for n, t in target.items() if n.startswith("model.layers.0.")}
    eye, none = torch.eye(H), torch.zeros(H, H)
    scale = (H / OLD_DIM) ** 0.5
    query = torch.cat([scale * _spread(layer["self_attn.q_proj.weight"]), 3 * eye, none, none])
    key = torch.cat([_spread(layer["self_attn.k_proj.weight"]), 3 * eye])
    value = torch.zeros(KV_HEADS + 1, H, 2 * H)
    value[:KV_HEADS, :OLD_DIM, :H] = layer["self_attn.v_proj.weight"].view(KV_HEADS, OLD_DIM, H)
    size = target["model.embed_tokens.weight"].pow(2).mean().sqrt()
    value[KV_HEADS] = torch.cat([torch.diag(size / layer["input_layernorm.weight"]), -eye], 1)
    out = torch.zeros(H, HEADS + GROUP, H)
    out[:, :HEADS, :OLD_DIM] = layer["self_attn.o_proj.weight"].view(H, HEADS, OLD_DIM)
    out[:, HEADS] = eye
    wide = torch.zeros(len(query), H)
    own = {
        "fc.weight": torch.cat([none, none, eye], 1),
        "norm.weight": target["model.norm.weight"],
        "midlayer.hidden_norm.weight": torch.ones(H),
        "midlayer.self_attn.q_proj.weight": torch.cat([query, wide], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([key, wide[: len(key)]], 1),
        "midlayer.self_attn.v_proj.weight": value.view(-1, 2 * H),
        "midlayer.self_attn.o_proj.weight": out.view(H, -1),
        "d2t": offsets_of(torch.tensor([token for token in range(VOCAB) if token % LEFT_OUT])),
    }
    same = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    return {**own, **{f"midlayer.{name}.weight": layer[f"{name}.weight"] for name in same}}


def head(words: str) -> Eagle3Head:
    own = weights()
    return Eagle3Head(
        tiny.target(words, NUDGED_FROM),
        config(),
        DictWeights({name: each for name, each in own.items() if name != "d2t"}),
        token_ids=token_ids_of(own["d2t"]),
        target_weights=DictWeights(tiny.tensors(NUDGED_FROM)),
        precision=precision(words),
    )

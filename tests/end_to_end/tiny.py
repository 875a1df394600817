"""Tiny real decoders whose early layers, adapters and draft models are often right and sometimes wrong."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.early_exit import EarlyExitDrafter
from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.suffix import SuffixDrafter
from outpace.engine.engine import Engine
from outpace.kv.cache import KvCache
from outpace.models.adapter import BlockAdapter
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.protocols import Controller, Drafter
from tests.engine.fakes import IdVocabulary
from tests.models.tiny_models import SIZES, DictWeights, precision

from . import tiny_head, tiny_mtp

VOCAB = SIZES["vocab_size"]
LAYERS = SIZES["num_hidden_layers"]
EXIT_LAYER = 2
CAPACITY = 400


def tensors(nudged_from: int = EXIT_LAYER) -> dict[str, torch.Tensor]:
    """A random llama whose layers from one on only nudge the stream, so that an exit there is often right."""
    return _tensors(nudged_from)


@functools.cache
def _tensors(nudged_from: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, wide, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], VOCAB
    head_dim = hidden // SIZES["num_attention_heads"]
    keys = SIZES["num_key_value_heads"] * head_dim

    def random(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    found = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden, scale=0.3)}
    for layer in range(LAYERS):
        nudge = 0.25 if layer < nudged_from else 0.03
        prefix = f"model.layers.{layer}."
        found[f"{prefix}self_attn.q_proj.weight"] = random(hidden, hidden)
        found[f"{prefix}self_attn.k_proj.weight"] = random(keys, hidden)
        found[f"{prefix}self_attn.v_proj.weight"] = random(keys, hidden)
        found[f"{prefix}self_attn.o_proj.weight"] = random(hidden, hidden, scale=nudge)
        found[f"{prefix}mlp.gate_proj.weight"] = random(wide, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = random(wide, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = random(hidden, wide, scale=nudge)
        found[f"{prefix}input_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        found[f"{prefix}post_attention_layernorm.weight"] = 1 + random(hidden, scale=0.1)
    found["model.norm.weight"] = 1 + random(hidden, scale=0.1)
    return found


def noisy(share: float) -> dict[str, torch.Tensor]:
    """The same weights with errors planted in every matrix: a draft model that is often right."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: t + share * t.std() * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t
        for name, t in tensors().items()
    }


def _decoder(weights: dict[str, torch.Tensor], quantization: str) -> Decoder:
    config = DecoderConfig.from_hf({"model_type": "llama", **SIZES})
    return Decoder(config, DictWeights(weights), precision=precision(quantization))


def target(quantization: str, nudged_from: int = EXIT_LAYER) -> Decoder:
    return _target(quantization, nudged_from)


@functools.cache
def _target(quantization: str, nudged_from: int) -> Decoder:
    return _decoder(tensors(nudged_from), quantization)


@functools.cache
def draft(quantization: str, share: float) -> Decoder:
    return _decoder(noisy(share), quantization)


def adapter(quantization: str) -> BlockAdapter:
    """One block that stands for the layers behind the exit: the next layer of the target itself, and its norm."""
    prefix = f"model.layers.{EXIT_LAYER}."
    own = {"block." + n.removeprefix(prefix): t for n, t in tensors().items() if n.startswith(prefix)}
    weights = DictWeights({**own, "norm.weight": tensors()["model.norm.weight"]})
    return BlockAdapter(
        target(quantization), weights, exit_layer=EXIT_LAYER, num_lanes=8, capacity=CAPACITY, max_rows=8 * CAPACITY
    )


def make_drafter(name: str, quantization: str, cache: KvCache, nudged_from: int = EXIT_LAYER) -> Drafter:
    if name == "ngram":
        return NgramDrafter(1, 4)
    if name == "draft_model":
        # Rounding to four bits already moves the draft away from its target.
        model = draft(quantization, 0.005 if quantization == "int4" else 0.02)
        return DraftModelDrafter(model, model.new_cache(8, CAPACITY, 8 * CAPACITY), max_model_len=CAPACITY)
    if name == "suffix_tree":
        return SuffixDrafter(tree_width=3)
    if name == "tree":
        model = draft(quantization, 0.005 if quantization == "int4" else 0.02)
        own_cache = model.new_cache(8, CAPACITY, 8 * CAPACITY)
        return DraftModelDrafter(model, own_cache, max_model_len=CAPACITY, tree_width=3)
    if name == "own_draft":
        model = target(quantization)
        return DraftModelDrafter(model, model.new_cache(8, CAPACITY, 8 * CAPACITY), max_model_len=CAPACITY)
    if name.startswith(("eagle3", "mtp")):
        head = tiny_head.head(quantization) if name.startswith("eagle3") else tiny_mtp.head(quantization)
        own_cache = head.new_cache(8, CAPACITY, 8 * CAPACITY)
        return FeatureHeadDrafter(name, head, own_cache, tree_width=3 if name.endswith("tree") else 1)
    chosen = adapter(quantization) if name.startswith("adapter") else None
    width = 3 if name.endswith("tree") else 1
    model = target(quantization, nudged_from)
    return EarlyExitDrafter(model, cache, exit_layer=EXIT_LAYER, adapter=chosen, tree_width=width)


def make_engine(
    names: Sequence[str],
    quantization: str,
    *,
    k: int = 4,
    rows: int = 512,
    max_rows: int = 8 * CAPACITY,
    prefixes: bool = True,
    controller: Controller | None = None,
    verification: str = "coupled",
    nudged_from: int = EXIT_LAYER,
) -> Engine:
    model = target(quantization, nudged_from)
    cache = model.new_cache(8, CAPACITY, max_rows)
    return Engine(
        model,
        cache,
        {name: make_drafter(name, quantization, cache, nudged_from) for name in names},
        vocabulary=IdVocabulary(model.vocab_size),
        eos_ids=(),
        max_model_len=CAPACITY,
        num_speculative_tokens={name: k for name in names},
        verification={name: verification for name in names},
        max_num_batched_tokens=rows,
        enable_prefix_caching=prefixes,
        controller=controller,
    )

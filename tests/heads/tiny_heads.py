"""Small EAGLE-3 heads of random weights, for targets of `tests.models.tiny_models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outpace.heads import Eagle3Config, eagle3_tensors, offsets_of
from outpace.models.config import DecoderConfig
from tests.models.tiny_models import SIZES

AUX_LAYERS = (1, 2, 3)
"""The tiny targets have four layers, too few for the usual three."""


def tiny_target(**changes: Any) -> DecoderConfig:
    """Shape of the tiny llama target."""
    return DecoderConfig.from_hf({"model_type": "llama", **SIZES, **changes})


def tiny_config(draft_vocab: int = 60, layer: Mapping[str, Any] | None = None, **changes: Any) -> Eagle3Config:
    """A head for `tiny_target`; `layer` changes keys of its layer's config."""
    sizes = {**SIZES, "model_type": "llama", "num_hidden_layers": 1, **(layer or {})}
    found = Eagle3Config(
        layer=DecoderConfig.from_hf(sizes),
        target_hidden_size=SIZES["hidden_size"],
        draft_vocab_size=draft_vocab,
        aux_layers=AUX_LAYERS,
    )
    return replace(found, **changes)


def tiny_tensors(config: Eagle3Config, *, seed: int = 5, embedding: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of such a head."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in eagle3_tensors(config).items():
        noise = torch.randn(*shape, generator=generator)
        found[name] = 1 + 0.1 * noise if "norm" in name else 0.25 * noise
    if config.is_pruned:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        found["d2t"] = offsets_of(ids)
    if embedding:
        found["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    return found


def rewrite(folder: Path, *, keys: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None) -> Path:
    """Changes keys of a head's config and tensors of its file; None takes one out."""
    config = json.loads((folder / "config.json").read_text())
    config |= keys or {}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    found: dict[str, Any] = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({name: each for name, each in found.items() if each is not None}, folder / "model.safetensors")
    return folder

"""A draft model that knows nothing: random weights under the target's tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import transformers

from outpace.config import EngineConfig
from outpace.source import Source


def save_random_draft(model: str, folder: Path, *, small: bool) -> None:
    """Writes a checkpoint to a folder.

    Args:
        model: the target, whose tokenizer it gets.
        folder: that is there, and empty.
        small: two layers of width 64; else of the target's own shape, so that it costs as much as the target.

    Raises:
        ValueError: the target does not run on outpace's own layers.
    """
    source = Source.open(model, EngineConfig(model), logging.getLogger(__name__).info)
    shape = source.shape
    if shape is None:
        raise ValueError(f"{model} runs on transformers' layers: its shape is not known here")
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=64 if small else shape.hidden_size,
        intermediate_size=128 if small else shape.intermediate_size,
        num_hidden_layers=2 if small else shape.num_layers,
        num_attention_heads=4 if small else shape.num_heads,
        num_key_value_heads=2 if small else shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(source.files.tokenizer.to_json(), encoding="utf-8")

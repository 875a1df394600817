"""Tiny random models of transformers, and calls of `generate` beside those of the accelerated model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers

import outpace
from outpace.accelerated.model import AcceleratedModel
from tests.models.tiny_tokenizers import byte_level

VOCAB = 265
BOS, EOS, PAD = 0, 1, 264
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48},
    "gpt2": {},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 48},
    "gemma2": {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "sliding_window": 16},
}


def tiny_model(kind: str = "llama") -> Any:
    """A model with weights that make its choices clear: no two logits of a row come close to a tie. One a kind."""
    return _tiny_model(kind)


@functools.cache
def _tiny_model(kind: str) -> Any:
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **KINDS[kind],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None  # tests say where a text may end
    return model


@functools.cache
def noisy_model(share: float = 0.05) -> Any:
    """The tiny llama with errors in its weights: a draft model that is often right."""
    model = copy.deepcopy(tiny_model())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(share * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


def accelerated(kind: str = "llama", drafter: str = "ngram") -> AcceleratedModel:
    """One of each sort. Drafters: "ngram", "suffix", "none", or "draft" for the noisy model."""
    return _accelerated(kind, drafter)


@functools.cache
def _accelerated(kind: str, drafter: str) -> AcceleratedModel:
    options: dict[str, Any] = {"max_num_seqs": 64, "speculative_control": "fixed"}  # drafts of tiny models never pay
    if drafter == "draft":
        return outpace.accelerate(tiny_model(kind), tokenizer(), assistant_model=noisy_model(), **options)
    config = {"method": "ngram", "prompt_lookup_min": 1} if drafter == "ngram" else drafter
    return outpace.accelerate(tiny_model(kind), tokenizer(), speculative_config=config, **options)


@functools.cache
def tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<tool> é", eos_token="</s>")


def padded_batch(count: int = 3, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts that repeat themselves, so that lookup finds something, with different padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, VOCAB - 1, (count, length), generator=generator)
    input_ids[:, length // 2 :] = input_ids[:, : length - length // 2]
    attention_mask = torch.ones_like(input_ids)
    for row in range(1, count):
        attention_mask[row, : 2 * row] = 0
        input_ids[row, : 2 * row] = PAD
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def both(kind: str, drafter: str, prompts: Mapping[str, torch.Tensor], **arguments: Any) -> tuple[Any, Any]:
    """(transformers' own result, the accelerated one)."""
    return tiny_model(kind).generate(**prompts, **arguments), accelerated(kind, drafter).generate(
        **prompts, **arguments
    )


def plain_token(row: int, at: int, kind: str = "llama") -> int:
    """The token that a row of the padded batch has at this place of its greedy output."""
    prompts = padded_batch()
    output = tiny_model(kind).generate(**prompts, max_new_tokens=at + 1)
    return int(output[row, prompts["input_ids"].shape[1] + at])

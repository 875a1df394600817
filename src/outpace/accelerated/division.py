"""What of a call the engine does itself, and what is left to transformers' logits processors and stopping criteria."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from outpace.errors import InvalidParameter
from outpace.params import SamplingParams, SpeculationParams

__all__ = ["divide_criteria", "divide_sampling", "for_one", "speculation_of"]

_BEHIND_TOP_P: Mapping[str, tuple[Any, ...]] = {
    "top_h": (None,),
    "min_p": (None,),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "watermarking_config": (None,),
}
"""Settings of sampling that transformers applies beside or after top_p, and the values that switch them off."""


def divide_criteria(
    criteria: StoppingCriteriaList, vocab_size: int
) -> tuple[StoppingCriteriaList, int, frozenset[int]]:
    """Lengths and ids, which the engine looks at itself, apart from the criteria that have to be asked."""
    max_length = min(item.max_length for item in criteria if type(item) is MaxLengthCriteria)
    ends = [item.eos_token_id for item in criteria if type(item) is EosTokenCriteria]
    stop_ids = frozenset(token for tensor in ends for token in tensor.tolist() if 0 <= token < vocab_size)
    rest = [item for item in criteria if type(item) not in (MaxLengthCriteria, EosTokenCriteria)]
    return StoppingCriteriaList(rest), max_length, stop_ids


def divide_sampling(config: GenerationConfig, seed: int | None) -> tuple[GenerationConfig, SamplingParams]:
    """Divides the work between transformers' logits processors and the engine's own filters.

    The engine does temperature and top_p, which it does without sorting the vocabulary, unless something comes after
    top_p, or top_p is 0, or the processed scores are wanted. top_k stays with transformers: it keeps every token that
    ties with the k-th, which happens with logits of 16 bits.
    """
    filtered = for_one(config)
    if not config.do_sample:
        return filtered, SamplingParams(temperature=0.0)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    plain = all(getattr(config, name, None) in off for name, off in _BEHIND_TOP_P.items()) and config.top_p != 0
    if not plain or (config.return_dict_in_generate and config.output_scores):
        return filtered, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=seed)
    filtered.temperature, filtered.top_p = 1.0, 1.0
    temperature, top_p = config.temperature, config.top_p
    return filtered, SamplingParams(
        temperature=1.0 if temperature is None else temperature, top_p=1.0 if top_p is None else top_p, seed=seed
    )


def for_one(config: GenerationConfig) -> GenerationConfig:
    """The settings of one sequence alone."""
    alone = copy.copy(config)
    alone.num_return_sequences = 1
    return alone


def speculation_of(config: GenerationConfig, methods: Collection[str]) -> SpeculationParams:
    """How drafts are made, as far as a call can say it.

    Raises:
        InvalidParameter: prompt lookup is asked for, and is not among the loaded methods.
    """
    count = config.prompt_lookup_num_tokens
    if count is None:
        return SpeculationParams()
    lookup = next((name for name in ("ngram", "suffix") if name in methods), None)
    if lookup is None:
        raise InvalidParameter(
            f"prompt_lookup_num_tokens={count!r} is not possible: this model was accelerated without prompt lookup; "
            "call accelerate with speculative_config='auto', 'suffix' or 'ngram'"
        )
    return SpeculationParams(method=lookup, num_speculative_tokens=count)

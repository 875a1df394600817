"""Puts the engine of an accelerated model together: the model itself as the target, drafters beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedModel

from outpace.accelerated.vocabulary import BareIds
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.control.making import make_controller
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.suffix import LEAST_CHANCE, SuffixDrafter
from outpace.drafters.suffix_pool import OutputPool
from outpace.engine.engine import Engine
from outpace.errors import InvalidParameter, UnsupportedModel, VocabularyMismatch
from outpace.models.decoder import Decoder
from outpace.models.hf import TransformersModel
from outpace.models.hf_bits import probe_rows
from outpace.models.load import available_bytes, load_files
from outpace.models.probe import ProbeReport
from outpace.models.selection import select_precision
from outpace.models.tokenizer import Tokenizer, check_same_vocabulary
from outpace.protocols import Drafter

__all__ = ["Assembled", "assemble", "read_speculative"]

_MOST_POSITIONS = 32768
"""Context unless max_model_len asks for more."""
_CACHE_SHARE = 0.5
"""Share of the free memory that the cache may grow into unless cache_tokens says."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine for a wrapped model.

    Args:
        engine: ready.
        target: the adapter around the wrapped model.
        config: the engine's settings with every automatic value resolved.
        methods: loaded drafters; none for plain decoding.
        probe: whether a row's bits depend on its neighbours here, and what is done about it.
    """

    engine: Engine
    target: TransformersModel
    config: EngineConfig
    methods: tuple[str, ...]
    probe: ProbeReport


def assemble(
    model: PreTrainedModel,
    tokenizer: Any,
    speculative: SpeculativeConfig,
    assistant: PreTrainedModel | None,
    config: EngineConfig,
) -> Assembled:
    """Wraps a model and everything it needs.

    Args:
        model: the target.
        tokenizer: its tokenizer; needed with a draft model that is loaded from files.
        speculative: which drafter.
        assistant: a draft model in memory, if the drafter is one.
        config: sizes; the fields about loading have no meaning here.

    Raises:
        UnsupportedModel: the model cannot be run, naming why.
        VocabularyMismatch: the draft model's tokens are not the target's.
    """
    target = _wrapped(model, config.max_model_len)
    probe = probe_rows(target)
    max_model_len = min(target.max_model_len, config.max_model_len or _MOST_POSITIONS)
    lanes = config.max_num_seqs
    max_rows = config.cache_tokens or _cache_rows(target, lanes, max_model_len)
    cache = target.new_cache(lanes, max_model_len, max_rows)
    max_model_len = min(max_model_len, max_rows)
    config = replace(config, max_model_len=max_model_len, cache_tokens=max_rows)
    drafters: dict[str, Drafter] = {}
    parts = speculative.parts(adaptive=config.speculative_control == "adaptive")
    for part in parts:
        drafters[part.method] = _drafter(part, target, tokenizer, assistant, config)
    engine = Engine(
        target,
        cache,
        drafters,
        vocabulary=BareIds(target.vocab_size),
        eos_ids=(),
        max_model_len=max_model_len,
        num_speculative_tokens={part.method: part.num_speculative_tokens or 0 for part in parts},
        verification={part.method: part.rejection_sample_method for part in parts},
        controller=make_controller(config.speculative_control, {}, floor=config.speculative_floor)[0],
        max_num_seqs=lanes,
        max_num_batched_tokens=config.max_num_batched_tokens,
        weight_bytes=target.weight_bytes,
    )
    return Assembled(engine, target, config, tuple(drafters), probe)


def _drafter(
    part: SpeculativeConfig,
    target: TransformersModel,
    tokenizer: Any,
    assistant: PreTrainedModel | None,
    config: EngineConfig,
) -> Drafter:
    if part.method == "suffix":
        return _suffix(part, target, config)
    if part.method == "ngram":
        assert part.prompt_lookup_min is not None
        return NgramDrafter(part.prompt_lookup_min, part.prompt_lookup_max)
    if part.method == "draft_model":
        return _draft_model(target, tokenizer, part, assistant, config)
    raise InvalidParameter(
        f"method={part.method!r} is not possible with an accelerated model: take auto, suffix, ngram, a draft model, "
        "or none"
    )


def _suffix(part: SpeculativeConfig, target: TransformersModel, config: EngineConfig) -> SuffixDrafter:
    if part.suffix_pool_file is not None:
        raise InvalidParameter(
            f"suffix_pool_file={part.suffix_pool_file!r} is not possible with an accelerated model: with "
            "suffix_decoding_max_cached_requests alone, outputs are kept as long as it lives"
        )
    most = part.suffix_decoding_max_cached_requests
    return SuffixDrafter(
        least_chance=LEAST_CHANCE[config.speculative_control],
        pool=OutputPool(max_outputs=most) if most else None,
        tree_width=part.width_on(target.takes_trees),
    )


def _wrapped(model: PreTrainedModel, max_model_len: int | None) -> TransformersModel:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"{type(model).__name__} is not a model of transformers: give a PreTrainedModel that can generate (of a "
            "PEFT model, what merge_and_unload() returns)"
        )
    if model.device.type != "cpu":
        raise UnsupportedModel(
            f"the model is on {model.device}, and outpace computes on the CPU: move it there with model.to('cpu')"
        )
    return TransformersModel(model, vocab_size=None, max_model_len=max_model_len)


def _cache_rows(target: TransformersModel, lanes: int, capacity: int) -> int:
    """Full lanes, or what half of the free memory holds, whichever is less, but one full lane at least."""
    free = available_bytes()
    if free is None:
        return lanes * capacity
    return max(capacity, min(lanes * capacity, int(free * _CACHE_SHARE) // target.cache_bytes_per_row))


def _draft_model(
    target: TransformersModel,
    tokenizer: Any,
    speculative: SpeculativeConfig,
    assistant: PreTrainedModel | None,
    config: EngineConfig,
) -> DraftModelDrafter:
    if assistant is None:
        assert speculative.model is not None
        draft: TransformersModel | Decoder = _load_draft(speculative, tokenizer, config)
    else:
        draft = _wrapped(assistant, None)  # its own positions: behind them it stops drafting
        if draft.vocab_size != target.vocab_size:
            raise VocabularyMismatch(
                f"assistant_model has {draft.vocab_size} tokens and the model {target.vocab_size}: take a draft model "
                "of the same family"
            )
    assert config.max_model_len is not None and config.cache_tokens is not None
    capacity = min(draft.max_model_len, config.max_model_len)
    cache = draft.new_cache(config.max_num_seqs, capacity, config.cache_tokens)
    width = speculative.width_on(target.takes_trees and draft.takes_trees)
    return DraftModelDrafter(draft, cache, max_model_len=capacity, weight_bytes=draft.weight_bytes, tree_width=width)


def _load_draft(speculative: SpeculativeConfig, tokenizer: Any, config: EngineConfig) -> Decoder:
    """A draft model from its files, on outpace's own kernels: its precision never changes the text."""
    assert speculative.model is not None
    files = load_files(speculative.model, allow_pickle=False, trust_remote_code=False)
    shape = files.checked_shape()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise InvalidParameter(
            f"the draft model {speculative.model!r} needs the target's tokenizer to compare vocabularies: give "
            "accelerate the model's fast tokenizer"
        )
    # A copy: the checking code switches padding and truncation off in its backend.
    check_same_vocabulary(Tokenizer(Backend.from_str(backend.to_str())), files.tokenizer)
    wanted = EngineConfig(quantization=speculative.quantization or "auto", kernels=config.kernels)
    return Decoder(
        shape,
        files.checkpoint,
        precision=select_precision(wanted, files.checkpoint),
        vocab_size=files.tokenizer.vocab_size,
    )


def read_speculative(value: Any, assistant: Any) -> tuple[SpeculativeConfig, PreTrainedModel | None]:
    """Settings of the drafter, and the draft model if it was given in memory.

    Raises:
        InvalidParameter: the settings are impossible or contradict an assistant model.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(assistant, (str, os.PathLike)):
        assistant, path = None, os.fspath(assistant)
        value = _with_model(value, path)
    elif assistant is not None:
        value = _with_model(value, "assistant_model")
    elif isinstance(value, PreTrainedModel):
        value, assistant = {"method": "draft_model", "model": "assistant_model"}, value
    return SpeculativeConfig.parse("auto" if value is None else value), assistant


def _with_model(value: Any, name: str) -> Any:
    """The settings with a draft model in them, which they must not contradict."""
    if value is None:
        return {"method": "draft_model", "model": name}
    if isinstance(value, Mapping) and value.get("method", "draft_model") == "draft_model" and "model" not in value:
        return {**value, "method": "draft_model", "model": name}
    raise InvalidParameter(
        f"speculative_config={value!r} and assistant_model contradict each other: give assistant_model alone, or with "
        "speculative_config={'num_speculative_tokens': ...}"
    )

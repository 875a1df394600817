"""Arguments of transformers' `generate` that cannot be honoured, each refused by its name.

Three kinds. Some change the text in a way that a single sequence with exact verification cannot give. Some hand in or
ask for things that live in transformers' own loop. And some only say how transformers should compute: these are refused
where a caller gives them, and let pass where the model's own generation config holds them, since they never change a
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from outpace.checks import shown
from outpace.errors import InvalidParameter

__all__ = ["check_call", "check_config", "check_leftovers"]

_PLAIN = "call the model's own generate for it"
_SPECULATION = "say how drafts are made with speculative_config when you call accelerate"
_OWN_CACHE = "outpace keeps keys and values in a cache of its own; leave it out"

_CHANGES_TEXT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), f"each sequence is decoded alone; use num_beams=1, or {_PLAIN}"),
    "num_beam_groups": ((1,), f"each sequence is decoded alone; use 1, or {_PLAIN}"),
    "diversity_penalty": ((0,), f"it belongs to beam search; use 0, or {_PLAIN}"),
    "constraints": ((), f"it belongs to beam search; {_PLAIN}"),
    "force_words_ids": ((), f"it belongs to beam search; {_PLAIN}"),
    "penalty_alpha": ((0,), f"contrastive search is not offered; leave it out, or {_PLAIN}"),
    "dola_layers": ((), f"contrasting layers is not offered; leave it out, or {_PLAIN}"),
    "guidance_scale": ((1,), f"guidance runs a second sequence through the model; use 1, or {_PLAIN}"),
    "token_healing": ((False,), f"healing of prompts is not offered; leave it out, or {_PLAIN}"),
    "use_mtp": ((False,), _SPECULATION),
    "assistant_early_exit": ((), _SPECULATION),
    "assistant_ensemble_weight": ((), "it changes what the model says, and outpace does not; leave it out"),
    "speculation_type": ((), _SPECULATION),
    "is_assistant": ((False,), _SPECULATION),
    "output_attentions": ((False,), f"attention weights are never formed; leave it out, or {_PLAIN}"),
    "output_hidden_states": ((False,), f"hidden states are not kept; leave it out, or {_PLAIN}"),
    "continuous_batching_config": ((), "sequences run side by side anyway: see max_num_seqs of accelerate"),
}
"""Name -> values beside None that ask for nothing, and what would work."""

_CHANGES_TIME: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((True,), "there is no decoding without a cache here; leave it out"),
    "cache_implementation": ((), _OWN_CACHE),
    "cache_config": ((), _OWN_CACHE),
    "max_cache_len": ((), "the cache holds max_model_len tokens a sequence, which accelerate takes"),
    "compile_config": ((), "nothing is compiled by torch here; leave it out"),
    "prefill_chunk_size": ((), "chunks of prompts follow max_num_batched_tokens, which accelerate takes"),
    "low_memory": ((False,), "it belongs to contrastive search; leave it out"),
    "max_matching_ngram_size": ((), "say it as prompt_lookup_max in speculative_config when you call accelerate"),
    "num_assistant_tokens": ((20,), "say it as num_speculative_tokens in speculative_config when you call accelerate"),
    "num_assistant_tokens_schedule": (("constant",), _SPECULATION),
    "assistant_confidence_threshold": ((0.4,), _SPECULATION),
    "assistant_lookbehind": ((10,), _SPECULATION),
    "target_lookbehind": ((10,), _SPECULATION),
}
"""The same for what says only how transformers should compute. Neutral are transformers' own defaults."""

_CALL: Mapping[str, str] = {
    "synced_gpus": "there is one process and one device; leave it out",
    "assistant_model": "give the draft model to accelerate: outpace.accelerate(model, tokenizer, assistant_model=...)",
    "assistant_tokenizer": "a draft model has to share the target's vocabulary; leave it out",
    "negative_prompt_ids": "guidance runs a second sequence through the model; " + _PLAIN,
    "negative_prompt_attention_mask": "guidance runs a second sequence through the model; " + _PLAIN,
    "custom_generate": "it replaces the loop that outpace makes faster; " + _PLAIN,
    "trust_remote_code": "it belongs to custom_generate; leave it out",
}
"""Arguments of the call itself; None and False ask for nothing."""

_LEFTOVERS: Mapping[str, str] = {
    "cache": _OWN_CACHE,
    "past_key_values": _OWN_CACHE,
    "cache_params": _OWN_CACHE,
    "inputs_embeds": "prompts are token ids here: give input_ids, or " + _PLAIN,
    "position_ids": "positions follow the attention mask; leave it out",
    "cache_position": "positions follow the attention mask; leave it out",
    "token_type_ids": "the model is run on token ids alone; tokenize with return_token_type_ids=False, or " + _PLAIN,
    "encoder_outputs": "only decoder-only models are run",
    "decoder_input_ids": "only decoder-only models are run; give input_ids",
    "labels": "nothing is trained here; leave it out",
    "logits_to_keep": "only the logits that are needed are computed anyway; leave it out",
}
"""Arguments that transformers would hand to the model's forward."""


def check_call(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses what cannot be honoured among the arguments that are no part of a generation config; returns the others.

    Raises:
        InvalidParameter: naming the argument and what would work.
    """
    for name, hint in _CALL.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise _refused(name, value, hint)
    return {name: value for name, value in arguments.items() if name not in _CALL}


def check_config(config: GenerationConfig, own: GenerationConfig) -> None:
    """Refuses what cannot be honoured in a complete generation config.

    Args:
        config: what is in force: the call's, the given config's and the model's values combined.
        own: the model's own config, whose values about how to compute are let pass.

    Raises:
        InvalidParameter: naming the argument and what would work.
    """
    for name, (neutral, hint) in _CHANGES_TEXT.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise _refused(name, value, hint)
    for name, (neutral, hint) in _CHANGES_TIME.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral and value != getattr(own, name, None):
            raise _refused(name, value, hint)
    marking = config.watermarking_config
    if marking is not None and type(marking).__name__ != "WatermarkingConfig":
        raise _refused("watermarking_config", marking, "it keeps a state from token to token; use a WatermarkingConfig")


def check_leftovers(arguments: Mapping[str, Any]) -> None:
    """Refuses whatever is neither a prompt nor part of a generation config.

    Raises:
        InvalidParameter: naming the argument.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if name in _LEFTOVERS:
            raise _refused(name, value, _LEFTOVERS[name])
        raise InvalidParameter(
            f"generate has no argument {name!r}: possible are input_ids, attention_mask, the settings of a "
            f"GenerationConfig, and seed. If the model itself takes it, {_PLAIN}"
        )


def _refused(name: str, value: Any, hint: str) -> InvalidParameter:
    return InvalidParameter(f"{name}={shown(value)} is not possible with an accelerated model: {hint}")

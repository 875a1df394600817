"""How drafts are made, from the flags and JSON keys of every generation of vLLM's command line. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from outpace.config import SpeculativeConfig
from outpace.errors import InvalidParameter

__all__ = ["IGNORED_KEYS", "REFUSED_KEYS", "Said", "by_key", "json_settings", "speculative_config"]

_OWN_KEYS = tuple(item.name for item in fields(SpeculativeConfig))
_RULES = {"strict": "coupled", "probabilistic": "standard", "rejection_sampler": "coupled"}
"""Other names of rules that outpace has: strict keeps a draft token where it is the target's own, as coupled does."""
_SAME_METHOD = {"ngram_gpu": "ngram"}
_MTP_ENDING = "_mtp"
"""Of vLLM's method names by family (deepseek_mtp, mimo_mtp): which it is, the checkpoint says."""
_NGRAM_WORDS = ("ngram", "[ngram]")

_IGNORED = """
    enforce_eager draft_tensor_parallel_size max_model_len disable_mqa_scorer disable_logprobs disable_log_stats
    speculative_token_tree moe_backend attention_backend kv_cache_dtype index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization
    use_local_argmax_reduction parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config enable_adaptive_verification
    draft_sample_method dspark_draft_topk xpress_topc
"""
IGNORED_KEYS = frozenset(_IGNORED.split())
"""Keys that concern the time drafts take, or hardware, and never the text."""

_LOSSY = "it is a setting of rules that change what the model says, and outpace has none of these"
_REVISION = "outpace takes a hub model's main revision: download another one and give its folder as the model"
REFUSED_KEYS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "posterior_threshold": (_LOSSY, lambda value: value == 0.09),
    "posterior_alpha": (_LOSSY, lambda value: value == 0.3),
    "synthetic_acceptance_rate": (_LOSSY, lambda value: False),
    "synthetic_acceptance_rates": (_LOSSY, lambda value: False),
    "synthetic_acceptance_length": (_LOSSY, lambda value: False),
    "fly_window_size": (_LOSSY, lambda value: False),
    "fly_entropy_threshold": (_LOSSY, lambda value: value == 0.3),
    "fly_entropy_top_k": (_LOSSY, lambda value: value == 3),
    "revision": (_REVISION, lambda value: value == "main"),
    "code_revision": (_REVISION, lambda value: value == "main"),
    "use_heterogeneous_vocab": ("a draft model must have the target's vocabulary", lambda value: value is False),
    "tensor_parallel_size": ("vLLM calls it draft_tensor_parallel_size; leave it out", lambda value: False),
}
"""{key: (why it is refused, whether a value changes nothing)}"""


class Said(NamedTuple):
    """One setting of a drafter, and the flag it came by."""

    flag: str
    value: Any


def json_settings(flag: str, text: str) -> list[tuple[str, Said]]:
    """The settings in a JSON object; null is not given. Hyphens in keys are underscores.

    Raises:
        InvalidParameter: the text is no JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"{flag} is not JSON ({error}): {text!r}") from None
    if not isinstance(found, dict):
        raise InvalidParameter(f'{flag} must be a JSON object such as {{"method": "ngram"}}, not {text!r}')
    return [(key.replace("-", "_"), Said(f"{flag} {key!r}", item)) for key, item in found.items() if item is not None]


def by_key(said: Iterable[tuple[str, Said]]) -> dict[str, Said]:
    """{key: what was said}.

    Raises:
        InvalidParameter: a key was given twice, with different values.
    """
    found: dict[str, Said] = {}
    for key, item in said:
        first = found.setdefault(key, item)
        if first.value != item.value:
            raise InvalidParameter(
                f"{first.flag} {first.value!r} and {item.flag} {item.value!r} contradict each other: give one of them"
            )
    return found


def speculative_config(said: Mapping[str, Said]) -> tuple[SpeculativeConfig, list[str]]:
    """The drafter's settings, and the flags and keys that were let pass because the text does not depend on them.

    Raises:
        InvalidParameter: a key is unknown, refused or out of range, or two contradict each other.
    """
    options: dict[str, Any] = {}
    ignored: list[str] = []
    for key, (flag, value) in said.items():
        if key in IGNORED_KEYS:
            ignored.append(flag)
        elif key in REFUSED_KEYS:
            reason, is_harmless = REFUSED_KEYS[key]
            if not is_harmless(value):
                raise InvalidParameter(f"{flag}: {value!r} is not possible: {reason}")
        elif key in ("acceptance_method", "rejection_sample_method"):
            _add_rule(options, flag, value)
        elif key in _OWN_KEYS:
            options[key] = value
        else:
            close = get_close_matches(key, [*_OWN_KEYS, *IGNORED_KEYS], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InvalidParameter(f"{flag} is not known: {hint}known keys: {', '.join(_OWN_KEYS)}")
    return SpeculativeConfig.parse(_translated(options, said) or "auto"), ignored


def _add_rule(options: dict[str, Any], flag: str, value: Any) -> None:
    rule = _RULES.get(value, value) if isinstance(value, str) else value
    if rule == "typical_acceptance_sampler":
        raise InvalidParameter(f"{flag}: {value!r} is not possible: it changes what the model says; leave it out")
    if options.setdefault("rejection_sample_method", rule) != rule:
        raise InvalidParameter("acceptance_method and rejection_sample_method contradict each other: give one of them")


def _translated(options: dict[str, Any], said: Mapping[str, Said]) -> dict[str, Any]:
    """The same with vLLM's words for what outpace has under another one."""
    found = dict(options)
    model, method = found.get("model"), found.get("method")
    if isinstance(method, str):
        method = "mtp" if method.endswith(_MTP_ENDING) else _SAME_METHOD.get(method, method)
        found["method"] = method
    if isinstance(model, str) and model in _NGRAM_WORDS and method not in (None, "ngram"):
        raise InvalidParameter(
            f"{said['model'].flag} {model!r} and {said['method'].flag} {method!r} contradict each other: give one"
        )
    if isinstance(model, str) and not model.strip():
        raise InvalidParameter(
            f"{said['model'].flag} {model!r} is not possible: write auto, ngram, self, self:E, mtp, none or a model"
        )
    if found.get("quantization") == "gguf":
        found["quantization"] = "file"
    shortest = found.get("prompt_lookup_min")
    if isinstance(shortest, int) and "prompt_lookup_max" not in found:
        found["prompt_lookup_max"] = max(SpeculativeConfig().prompt_lookup_max, shortest)
    return found

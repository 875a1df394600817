"""Parameters of other engines that outpace does not have: each is refused by its name, with what would work instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from outpace.checks import shown
from outpace.errors import InvalidParameter

__all__ = ["REFUSED", "STRUCTURED_REFUSED", "Refusal", "RefusesByName", "known_arguments"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A parameter that outpace does not have.

    Args:
        reason: why, and what would work.
        neutral: values that change nothing, besides None; `known_arguments` lets them pass.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether leaving the parameter out would do the same. True is not 1 here."""
        same = [item for item in self.neutral if isinstance(item, bool) == isinstance(value, bool)]
        return value is None or value in same


class RefusesByName(type):
    """Makes a dataclass answer unknown arguments with InvalidParameter in place of TypeError.

    The class names in `_refused` what it refuses for a reason; type checkers see the dataclass's own signature.
    """

    _refused: Mapping[str, Refusal] = {}

    def __call__(cls: type[T], *args: Any, **options: Any) -> T:
        known = _names(cls)
        for name, value in options.items():
            if name not in known:
                raise _unknown(cls, name, value, known)
        made: T = type.__call__(cls, *args, **options)
        return made


def known_arguments(cls: RefusesByName, given: Mapping[Any, Any]) -> dict[str, Any]:
    """The arguments for `cls` out of a mapping from elsewhere: None and neutral values of refused names are left out.

    Raises:
        InvalidParameter: a name that `cls` does not have.
    """
    known = _names(cls)
    for name, value in given.items():
        refusal = cls._refused.get(name)
        if name not in known and not (refusal and refusal.is_neutral(value)):
            raise _unknown(cls, name, value, known)
    return {name: value for name, value in given.items() if name in known and value is not None}


def _names(cls: Any) -> list[str]:
    return [item.name for item in fields(cls)]


def _unknown(cls: type, name: Any, value: Any, known: list[str]) -> InvalidParameter:
    refusal = getattr(cls, "_refused", {}).get(name)
    if refusal:
        return InvalidParameter(f"{name}={shown(value)} is not possible: {refusal.reason}")
    close = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    question = f"did you mean {close[0]}? Known" if close else "known"
    return InvalidParameter(f"{cls.__name__} has no {shown(name)}; {question}: {', '.join(known)}")


_BEAMS = "it belongs to beam search, and outpace chooses token by token; temperature=0 takes the most likely ones"
_MIROSTAT = "outpace has no mirostat; temperature, top_p and min_p limit how surprising tokens are"
_DRY = "outpace has no DRY sampling; frequency_penalty and presence_penalty act against repetition"
_XTC = "outpace does not exclude top choices (XTC); a higher temperature with min_p gives variety"
_DYNAMIC = "outpace has no dynamic temperature; set temperature, and min_p to keep unlikely tokens out"
_SMOOTHING = "outpace has no smoothed sampling; temperature and min_p shape the distribution"
_TAIL = "outpace does not cut the distribution this way; min_p or top_p cut its tail"
_TYPICAL = "outpace has no typical sampling; top_p or min_p cut the distribution's tail"
_TAIL_FREE = "outpace has no tail-free sampling; min_p or top_p cut the distribution's tail"
_WINDOW = "penalties count the whole text; repetition_penalty, frequency_penalty and presence_penalty set them"
_CONTRASTIVE = "outpace has no contrastive search; repetition_penalty or frequency_penalty act against repetition"
_NGRAMS = "outpace has no ban on repeated n-grams; repetition_penalty or frequency_penalty act against repetition"
_GUIDED = "it is part of structured_outputs here"

REFUSED: Mapping[str, Refusal] = {
    # of vLLM, and the servers that followed it
    "best_of": Refusal("outpace returns every answer it samples; use n, and choose among its answers", (1,)),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "beam_width": Refusal(_BEAMS, (1,)),
    "detokenize": Refusal("text always comes with the token ids; leave it out", (True,)),
    "output_kind": Refusal("`generate` returns finished answers and `stream` what is new; choose between them"),
    "flat_logprobs": Refusal("logprobs have one form, a mapping for each token; leave it out", (False,)),
    "logits_processor": Refusal("use logits_processors=[function]"),
    "guided_json": Refusal(f"{_GUIDED}: structured_outputs={{'json': schema}}"),
    "guided_regex": Refusal(f"{_GUIDED}: structured_outputs={{'regex': expression}}"),
    "guided_choice": Refusal(f"{_GUIDED}: structured_outputs={{'choice': [text, ...]}}"),
    "guided_grammar": Refusal(f"{_GUIDED}: structured_outputs={{'grammar': grammar}}"),
    "guided_json_object": Refusal(f"{_GUIDED}: structured_outputs={{'json_object': True}}", (False,)),
    "guided_decoding": Refusal("use structured_outputs, whose fields are json, regex, choice, grammar, json_object"),
    "guided_decoding_backend": Refusal("there is one implementation of structured_outputs; leave it out"),
    "guided_whitespace_pattern": Refusal("white space follows the grammar; write it into structured_outputs' grammar"),
    "response_format": Refusal("use structured_outputs={'json': schema} or {'json_object': True}", ({"type": "text"},)),
    "max_completion_tokens": Refusal("use max_tokens"),
    "top_logprobs": Refusal("use logprobs"),
    "extra_args": Refusal("there is nobody to hand further arguments to; leave it out", ({},)),
    # of transformers
    "max_new_tokens": Refusal("use max_tokens"),
    "min_new_tokens": Refusal("use min_tokens"),
    "max_length": Refusal("use max_tokens, which counts the answer without the prompt"),
    "min_length": Refusal("use min_tokens, which counts the answer without the prompt", (0,)),
    "num_return_sequences": Refusal("use n"),
    "do_sample": Refusal("use temperature: 0 is greedy, above that tokens are sampled"),
    "stop_strings": Refusal("use stop"),
    "eos_token_id": Refusal("the model's own end every answer; use stop_token_ids for more, ignore_eos=True for none"),
    "bad_words_ids": Refusal("use bad_words with texts, or logit_bias for single tokens"),
    "suppress_tokens": Refusal("use logit_bias with -100, or allowed_token_ids", ([], ())),
    "num_beams": Refusal(_BEAMS, (1,)),
    "num_beam_groups": Refusal(_BEAMS, (1,)),
    "diversity_penalty": Refusal(_BEAMS, (0,)),
    "length_penalty": Refusal(_BEAMS, (1,)),
    "early_stopping": Refusal(_BEAMS, (False,)),
    "typical_p": Refusal(_TYPICAL, (1,)),
    "epsilon_cutoff": Refusal(_TAIL, (0,)),
    "eta_cutoff": Refusal(_TAIL, (0,)),
    "no_repeat_ngram_size": Refusal(_NGRAMS, (0,)),
    "encoder_repetition_penalty": Refusal("only repetition_penalty, which counts prompt and answer, is there", (1,)),
    "guidance_scale": Refusal("outpace has no classifier-free guidance; a logits processor can change logits", (1,)),
    "penalty_alpha": Refusal(_CONTRASTIVE, (0,)),
    # of llama.cpp, and the front ends around it
    "n_predict": Refusal("use max_tokens"),
    "num_predict": Refusal("use max_tokens"),
    "repeat_penalty": Refusal("use repetition_penalty", (1,)),
    "repeat_last_n": Refusal(_WINDOW, (-1,)),
    "n_probs": Refusal("use logprobs", (0,)),
    "typical": Refusal(_TYPICAL, (1,)),
    "tfs": Refusal(_TAIL_FREE, (1,)),
    "tfs_z": Refusal(_TAIL_FREE, (1,)),
    "top_a": Refusal(_TAIL, (0,)),
    "top_n_sigma": Refusal(_TAIL, (0, -1)),
    "min_keep": Refusal("filters always keep the most likely token and promise no more; leave it out", (0, 1)),
    "mirostat": Refusal(_MIROSTAT, (0,)),
    "mirostat_mode": Refusal(_MIROSTAT, (0,)),
    "mirostat_tau": Refusal(_MIROSTAT, (5,)),
    "mirostat_eta": Refusal(_MIROSTAT, (0.1,)),
    "dry_multiplier": Refusal(_DRY, (0,)),
    "dry_base": Refusal(_DRY, (1.75,)),
    "dry_allowed_length": Refusal(_DRY, (2,)),
    "dry_sequence_breakers": Refusal(_DRY, ([], ["\n", ":", '"', "*"])),
    "dry_penalty_last_n": Refusal(_DRY, (0, -1)),
    "xtc_probability": Refusal(_XTC, (0,)),
    "xtc_threshold": Refusal(_XTC, (0.1,)),
    "dynatemp_range": Refusal(_DYNAMIC, (0,)),
    "dynatemp_exponent": Refusal(_DYNAMIC, (1,)),
    "smoothing_factor": Refusal(_SMOOTHING, (0,)),
    "smoothing_curve": Refusal(_SMOOTHING, (1,)),
    "samplers": Refusal("the order of processing is fixed; docs/parameters.md has it"),
    "temperature_last": Refusal("the order of processing is fixed; min_p, top_k, top_p follow temperature", (False,)),
    "grammar": Refusal("use structured_outputs={'grammar': text}", ("",)),
    "json_schema": Refusal("use structured_outputs={'json': schema}"),
}
"""What other engines have and `SamplingParams` does not; the secondary settings of a method are neutral at their usual
values, because the method itself is refused as soon as it does something."""

_WHITESPACE = "white space between JSON values is bounded and not a setting; write a grammar to prescribe it"

STRUCTURED_REFUSED: Mapping[str, Refusal] = {
    "structural_tag": Refusal("outpace has no structural tags; a grammar can hold fixed text around a JSON value"),
    "whitespace_pattern": Refusal(_WHITESPACE),
    "disable_any_whitespace": Refusal(_WHITESPACE, (False,)),
    "disable_additional_properties": Refusal("write additionalProperties: false into the schema", (False,)),
    "disable_fallback": Refusal("there is one implementation and nothing to fall back to; leave it out", (False, True)),
    "backend": Refusal("there is one implementation; leave it out", ("auto",)),
    "json_schema": Refusal("use json"),
    "type": Refusal("use json, regex, choice, grammar or json_object by name"),
}
"""The same for `StructuredOutputs`."""

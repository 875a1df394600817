"""What one request asks for: sampling parameters (vLLM's names and meanings) and how to speculate.

Never imports torch: clients, servers and tests build these without loading an engine. What a parameter means, what is
possible and what it does under speculation stands with its field; help, docs and errors say it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from outpace.checks import (
    boolean,
    check_fields,
    check_integer,
    id_biases,
    impossible,
    integer,
    number,
    one_of,
    optional,
    parameter,
    processors,
    texts,
    token_ids,
)
from outpace.errors import InvalidParameter
from outpace.refused import REFUSED, Refusal, RefusesByName, known_arguments
from outpace.speculation_params import MAX_DRAFT_TOKENS, SpeculationParams, check_num_speculative_tokens
from outpace.structured import StructuredOutputs

__all__ = [
    "LOGPROBS_MODES",
    "MAX_DRAFT_TOKENS",
    "LogitsProcessor",
    "SamplingDefaults",
    "SamplingParams",
    "SpeculationParams",
    "check_integer",
    "check_num_speculative_tokens",
]

MAX_CHOICES = 128
"""Upper limit of n."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")

_COUNT = "an integer: a count of 0 or more, or -1 for all; at most the engine's max_logprobs (20 unless it says more)"
_STRUCTURES = ", ".join(item.name for item in fields(StructuredOutputs))
_EVERY_ROW = "every row of a draft is processed as if it came alone; drafters draw with it too"
_COUNTED = "every row counts the draft tokens before it, as if they were committed"
_TEXT_ONLY = "concerns text, which is made from committed tokens only"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a parameter left at None means: the model's generation config, else the front's own choice."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: the rest of the context


LogitsProcessor = Callable[..., Any]
"""A caller's own change to logits: f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits.

`logits` is a torch tensor [V] float32 of its own, which may be changed and returned; the ids are lists. It must be a
pure function: it is called for draft tokens that may be given up, and again after them.
"""


def _seed(name: str, value: Any, valid: str) -> int | None:
    seed: int = integer(-(2**63), 2**64 - 1)(name, value, valid)
    return None if seed == -1 else seed


def _count_of_logprobs(name: str, value: Any, valid: str) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    count: int = integer(-1)(name, value, valid)
    return count


def _structured(name: str, value: Any, valid: str) -> StructuredOutputs:
    return StructuredOutputs.parse(value)


def _prompt_length(name: str, value: Any, valid: str) -> int:
    count = check_integer(name, value, low=-1, text=valid)
    if count == 0:
        raise impossible(name, value, valid)
    return count


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=RefusesByName):
    """How tokens are chosen, where generation ends, and what is returned; vLLM's names and meanings.

    None means "the default of the model or the front" where `SamplingDefaults` has one, else "off" or "none". Values
    are held in one form: numbers as int or float, lists as tuples, ids of `logit_bias` as int.

    Raises:
        InvalidParameter: at construction, naming the value and the valid range, or a name that outpace refuses.
    """

    _refused: ClassVar[Mapping[str, Refusal]] = REFUSED

    n: int = parameter(
        1,
        integer(1, MAX_CHOICES),
        meaning="how many answers to give, each drawn with noise of its own; the first is the same for every n",
        valid=f"an integer from 1 to {MAX_CHOICES}",
        speculation="each answer is drafted for and verified on its own",
    )
    temperature: float | None = parameter(
        None,
        optional(number(0)),
        meaning="randomness: logits are divided by it, and 0 always takes the most likely token",
        valid="a number, 0 (greedy) or more",
        speculation="same tokens at any temperature; drafters draw at the same one",
        unset="the model's generation config, else 1 (command line: 0)",
    )
    top_p: float | None = parameter(
        None,
        optional(number(0, 1, above=0)),
        meaning="draw only from the smallest set of most likely tokens that together are this probable",
        valid="a number in (0, 1]; 1 is off",
        speculation=_EVERY_ROW,
        unset="the model's generation config, else 1",
    )
    top_k: int | None = parameter(
        None,
        optional(integer(-1)),
        meaning="draw only from this many most likely tokens",
        valid="a count, or 0 or -1 for off",
        speculation=_EVERY_ROW,
        unset="the model's generation config, else 0",
    )
    min_p: float | None = parameter(
        None,
        optional(number(0, 1)),
        meaning="never draw a token that is less likely than this share of the most likely one",
        valid="a number in [0, 1]; 0 is off",
        speculation=_EVERY_ROW,
        unset="the model's generation config, else 0",
    )
    seed: int | None = parameter(
        None,
        optional(_seed),
        meaning="number that the noise of drawing is made from: the same seed gives the same tokens",
        valid="a 64-bit integer, signed or not; -1 is none",
        speculation="part of the noise of every position, which target and drafters share",
        unset="drawn for every request",
    )
    presence_penalty: float = parameter(
        0.0,
        number(-2, 2),
        meaning="lower the logit of every token that is in the answer so far by this much",
        valid="a number in [-2, 2]; 0 is off",
        speculation=_COUNTED,
    )
    frequency_penalty: float = parameter(
        0.0,
        number(-2, 2),
        meaning="lower the logit of a token by this much for every time it is in the answer so far",
        valid="a number in [-2, 2]; 0 is off",
        speculation=_COUNTED,
    )
    repetition_penalty: float | None = parameter(
        None,
        optional(number(0.01, 100)),
        meaning="divide the positive logits of tokens in prompt or answer by this, and multiply the negative ones: "
        "above 1 avoids repetition, below 1 invites it",
        valid="a number in [0.01, 100]; 1 is off",
        speculation=_COUNTED,
        unset="the model's generation config, else 1",
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None,
        optional(id_biases(100)),
        meaning="add to the logits of single tokens",
        valid="a mapping of token ids, 0 or more, to numbers in [-100, 100]",
        speculation="the same for every row",
        unset="off",
        hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None,
        optional(token_ids(at_least=1)),
        meaning="allow no tokens but these",
        valid="a list of one or more token ids, 0 or more each",
        speculation="a draft is cut at its first token that is not allowed",
        unset="all",
    )
    bad_words: Sequence[str] = parameter(
        (),
        texts(),
        meaning="never write these texts: the last token of one is banned where its other tokens came before",
        valid="a list of texts of at least one character",
        speculation=_COUNTED,
    )
    logits_processors: Sequence[LogitsProcessor] = parameter(
        (),
        processors,
        meaning="your own functions, f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits, in order",
        valid="a list of functions that take two or three positional arguments",
        speculation="called for every row with the draft tokens before it in output_ids, also for drafts that are "
        "given up and for a draft model's logits; has to be a pure function",
    )
    structured_outputs: StructuredOutputs | None = parameter(  # noqa: RUF009  (it makes a field)
        None,
        optional(_structured),
        meaning=f"what the text has to look like: one of {_STRUCTURES}",
        valid="a StructuredOutputs, or a mapping with one of its fields",
        speculation="a draft is cut at the first token that the grammar refuses; text it prescribes is drafted",
        unset="off",
    )
    min_tokens: int = parameter(
        0,
        integer(0),
        meaning="do not end before the answer has this many tokens, at EOS, stop tokens or stop strings; where a "
        "grammar's text is complete, it ends all the same",
        valid="an integer, 0 or more, at most max_tokens",
        speculation="a row counts the draft tokens before it",
    )
    max_tokens: int | None = parameter(
        None,
        optional(integer(1)),
        meaning="end the answer after this many tokens",
        valid="an integer, at least 1",
        speculation="a draft is no longer than what is left",
        unset="the rest of the context (command line: 512)",
    )
    stop: Sequence[str] = parameter(
        (),
        texts(alone=True),
        meaning="end the answer before these texts, which are left out of it",
        valid="strings of at least one character",
        speculation="looked for token by token in what was accepted; what follows is given up",
    )
    stop_token_ids: Sequence[int] = parameter(
        (),
        token_ids(),
        meaning="end the answer at these token ids too, not only at the model's own",
        valid="token ids, 0 or more",
        speculation="nothing behind one is drafted or kept",
    )
    include_stop_str_in_output: bool = parameter(
        False,
        boolean,
        meaning="keep the stop string, or the text of the stop token, in the text",
        valid="True or False",
        speculation=_TEXT_ONLY,
    )
    ignore_eos: bool = parameter(
        False,
        boolean,
        meaning="go on after the model's own end tokens",
        valid="True or False",
        speculation="drafts go on behind them too",
    )
    logprobs: int | None = parameter(
        None,
        optional(_count_of_logprobs),
        meaning="return the log probability of each token, and of this many most likely ones beside it",
        valid=_COUNT,
        speculation="taken from the target's own rows: the same numbers as without drafts",
        unset="off",
    )
    prompt_logprobs: int | None = parameter(
        None,
        optional(_count_of_logprobs),
        meaning="return log probabilities for the tokens of the prompt too, likewise",
        valid=_COUNT,
        speculation="the prompt is computed by the target alone",
        unset="off",
    )
    logprobs_mode: str = parameter(
        "raw_logprobs",
        one_of(LOGPROBS_MODES),
        meaning="take log probabilities of the model's own logits, or of those left after all processing",
        valid=" or ".join(LOGPROBS_MODES),
        speculation="the same numbers as without drafts",
    )
    skip_special_tokens: bool = parameter(
        True, boolean, meaning="leave special tokens out of the text", valid="True or False", speculation=_TEXT_ONLY
    )
    spaces_between_special_tokens: bool = parameter(
        True,
        boolean,
        meaning="put spaces between special tokens that are shown, where the tokenizer would",
        valid="True or False",
        speculation=_TEXT_ONLY,
    )
    truncate_prompt_tokens: int | None = parameter(
        None,
        optional(_prompt_length),
        meaning="keep only this many tokens of the prompt, its last; -1 keeps as many as fit",
        valid="an integer, at least 1, or -1",
        speculation="done before anything is drafted",
        unset="a prompt that is too long is refused",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
                "lower the one or raise the other"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Parameters as they arrive from elsewhere, such as the body of an HTTP request.

        None means "left out" for every name. Parameters of other engines pass if their value changes nothing there
        (`best_of: 1`, `use_beam_search: false`).

        Raises:
            InvalidParameter: a name that outpace does not have, or a value that is not possible.
        """
        if not isinstance(mapping, Mapping):
            raise impossible("sampling parameters", mapping, "a mapping of names to values")
        return cls(**known_arguments(cls, mapping))

    def resolved(self, defaults: SamplingDefaults) -> SamplingParams:
        """The same parameters with every None filled in (max_tokens may stay None: the rest of the context).

        A default of max_tokens gives way to min_tokens.
        """
        most = defaults.max_tokens
        return replace(
            self,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=(
                defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
            ),
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            max_tokens=self.max_tokens or (None if most is None else max(most, self.min_tokens)),
        )

"""What one request asks for: sampling parameters (vLLM's names and meanings) and how to speculate.

Never imports torch: clients, servers and tests build these without loading an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

from outpace.errors import InvalidParameter
from outpace.structured import StructuredOutputs

__all__ = ["MAX_DRAFT_TOKENS", "LogitsProcessor", "SamplingDefaults", "SamplingParams", "SpeculationParams"]

MAX_DRAFT_TOKENS = 64
"""Upper limit of num_speculative_tokens: a longer draft is never worth verifying in one pass."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a parameter left at None means: the model's generation config, else the front's own choice."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None  # None: the rest of the context


LogitsProcessor = Callable[..., Any]
"""A caller's own change to logits: f(output_ids, logits) or f(prompt_ids, output_ids, logits) -> logits.

`logits` is a torch tensor [V] float32 of its own, which may be changed and returned; the ids are lists. It must be a
pure function: it is called for draft tokens that may be given up, and again after them.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, where generation ends, and what is returned; vLLM's names and meanings.

    None means "the default of the model or the front" where `SamplingDefaults` has one, else "off".

    Raises:
        InvalidParameter: at construction, naming the value and the valid range.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputs | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        if self.temperature is not None:
            put("temperature", _number("temperature", self.temperature, low=0.0, text="0 (greedy) or more"))
        if self.top_p is not None:
            put("top_p", _number("top_p", self.top_p, high=1.0, text="in (0, 1]; 1 means off", above=0.0))
        put("min_p", _number("min_p", self.min_p, low=0.0, high=1.0, text="in [0, 1]; 0 means off"))
        if self.top_k is not None:
            put("top_k", check_integer("top_k", self.top_k, low=-1, text="a count, or 0 or -1 for off"))
        if self.max_tokens is not None:
            put("max_tokens", check_integer("max_tokens", self.max_tokens, low=1, text="an integer, at least 1"))
        if self.seed is not None:
            put("seed", check_integer("seed", self.seed, low=-(2**63), high=2**64 - 1, text="a 64-bit integer"))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not possible: it must be True or False")

    def resolved(self, defaults: SamplingDefaults) -> SamplingParams:
        """The same parameters with every None filled in (max_tokens may stay None: the rest of the context)."""
        return replace(
            self,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            max_tokens=defaults.max_tokens if self.max_tokens is None else self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How one request speculates; the default follows the engine.

    Args:
        enabled: False decodes this request plainly.
        method: one of the engine's drafters by name; None takes its first.
        num_speculative_tokens: most draft tokens a step, 0 to 64; None takes the engine's setting.
    """

    enabled: bool = True
    method: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            count = check_num_speculative_tokens(self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens", count)
        if not isinstance(self.enabled, bool):
            raise InvalidParameter(f"enabled={self.enabled!r} is not possible: it must be True or False")


def check_num_speculative_tokens(value: int) -> int:
    """The value as an int.

    Raises:
        InvalidParameter: it is none, or out of range.
    """
    text = f"an integer, 0 (off) to {MAX_DRAFT_TOKENS}"
    return check_integer("num_speculative_tokens", value, low=0, high=MAX_DRAFT_TOKENS, text=text)


def _number(
    name: str, value: float, *, low: float = -math.inf, high: float = math.inf, text: str, above: float | None = None
) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < low or value > high or (above is not None and value <= above):
        raise InvalidParameter(f"{name}={value!r} is not possible: it must be {text}")
    return float(value)


def check_integer(name: str, value: int, *, low: int, high: float = math.inf, text: str) -> int:
    """The value as an int, whatever kind of integer it is.

    Raises:
        InvalidParameter: it is none, or out of range; `text` says what would be possible.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low or value > high:
        raise InvalidParameter(f"{name}={value!r} is not possible: it must be {text}")
    return int(value)


def _stop_strings(value: Sequence[str] | str | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value or ()
    if not isinstance(strings, Sequence) or any(not isinstance(item, str) or not item for item in strings):
        raise InvalidParameter(f"stop={value!r} is not possible: it must be strings of at least one character")
    return tuple(strings)


def _stop_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    if not isinstance(value or (), Sequence) or isinstance(value, str):
        raise InvalidParameter(f"stop_token_ids={value!r} is not possible: it must be token ids, 0 or more")
    return tuple(check_integer("stop_token_ids", item, low=0, text="token ids, 0 or more") for item in value or ())

"""What callers may give as a prompt, and how it becomes requests of an engine. Both fronts use this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from outpace.engine.request import Request
from outpace.errors import InvalidParameter, InvalidPrompt
from outpace.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from outpace.build import Built
    from outpace.models.tokenizer import Tokenizer

__all__ = ["Messages", "Prompt", "as_prompts", "encode_prompt", "is_conversation", "prepare_choices"]

Messages = Sequence[Mapping[str, Any]]
"""A conversation in the OpenAI form: [{"role": "user", "content": "..."}, ...]."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


def prepare_choices(
    built: Built,
    ids: Sequence[int],
    params: SamplingParams | None,
    speculation: SpeculationParams | None,
    tenant: str = "",
) -> list[Request]:
    """One request for each of the n choices; they share a seed if one is given, and draw different noise from it.

    Nothing is queued. May run in any thread, also while the engine is stepping in another.

    Raises:
        BadInput: the prompt or a parameter is not possible.
    """
    for value, kind in ((params, SamplingParams), (speculation, SpeculationParams)):
        if value is not None and not isinstance(value, kind):
            raise InvalidParameter(f"{value!r} is not possible: it must be {kind.__name__}")
    resolved = (params or SamplingParams()).resolved(built.defaults)
    return [
        built.engine.prepare(ids, resolved, speculation, number=number, tenant=tenant) for number in range(resolved.n)
    ]


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Token ids of text; token ids as they are.

    Raises:
        InvalidPrompt: it is neither.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidPrompt(f"the prompt {prompt!r} is not possible: give text or token ids")
    ids = list(prompt)
    wrong = next((item for item in ids if not isinstance(item, Integral) or isinstance(item, bool)), None)
    if wrong is not None:
        raise InvalidPrompt(f"the prompt has {wrong!r} among its token ids: they must be integers")
    return [int(item) for item in ids]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. Token ids of one prompt are told by their first element.

    Raises:
        InvalidPrompt: neither text nor a list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise InvalidPrompt(f"the prompt {prompts!r} is not possible: give text, token ids, or a list of these")
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items


def is_conversation(prompt: Prompt | Messages) -> bool:
    """Whether it is messages rather than text or token ids."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)

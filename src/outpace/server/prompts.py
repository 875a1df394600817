"""Prompts of completions: text, token ids, or several of either."""

from __future__ import annotations

import asyncio
from typing import Any

from outpace.checks import shown
from outpace.models.tokenizer import Tokenizer
from outpace.server.errors import ApiError

__all__ = ["encode", "prompts_of"]


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """One prompt or several -> several.

    Raises:
        ApiError: 400, naming the part that is neither text nor token ids.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _impossible("prompt", prompt, "text, token ids, or a list of one or more of these")
    if all(type(item) is int for item in prompt):
        return [prompt]
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and all(type(number) is int for number in item)
        if not isinstance(item, str) and not ids:
            raise _impossible(f"prompt[{index}]", item, "text or a list of token ids, like the others")
    return list(prompt)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, computed in a thread.

    Args:
        tokenizer: of the model.
        text: the prompt.
        add_special_tokens: put BOS in front if this tokenizer does.

    Raises:
        InvalidPrompt: the text is not valid Unicode.
    """
    ids = await asyncio.to_thread(tokenizer.encode, text)
    prefix = tokenizer.encode("")
    if add_special_tokens or not prefix or text.startswith(tokenizer.decode(prefix, skip_special_tokens=False)):
        return ids
    return ids[len(prefix) :]


def _impossible(label: str, value: Any, valid: str) -> ApiError:
    return ApiError(400, f"{label}={shown(value)} is not possible: it must be {valid}", param=label)

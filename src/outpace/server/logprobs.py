"""Log probabilities in the forms of the two kinds of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob

from outpace.engine.outputs import Logprob, TokenLogprobs
from outpace.server.bodies import CompletionLogprobs, PromptLogprobs

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

Tokens = Iterable[tuple[int, TokenLogprobs | None]]
"""Token ids with log probabilities."""

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; vLLM's number."""


def chat_logprobs(tokens: Tokens, count: int, *, as_ids: bool) -> list[ChatCompletionTokenLogprob]:
    """`logprobs.content` of a message: every token with the `count` most likely ones, all there are if it is negative.

    `bytes` is null where a token is no text of its own (a part of a character).
    """
    found = []
    for token_id, logprobs in tokens:
        if logprobs is None:
            continue
        own = _chat_token(token_id, logprobs[token_id], as_ids)
        top = [_chat_token(other, item, as_ids) for other, item in _ranked(logprobs) if count < 0 or item.rank <= count]
        found.append(ChatCompletionTokenLogprob(**own, top_logprobs=[TopLogprob(**item) for item in top]))
    return found


def completion_logprobs(
    tokens: Tokens, offsets: Sequence[int], text: Callable[[int], str], *, as_ids: bool
) -> CompletionLogprobs:
    """`logprobs` of a completion; a token without log probabilities has null (the first of a prompt).

    Args:
        tokens: in order.
        offsets: where the text of each begins, in characters of the choice's text.
        text: of a token alone.
        as_ids: write tokens as `token_id:ID`.
    """
    names: list[str] = []
    own: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, logprobs in tokens:
        if logprobs is None:
            names.append(f"token_id:{token_id}" if as_ids else text(token_id))
            own.append(None)
            top.append(None)
            continue
        names.append(_name(token_id, logprobs[token_id], as_ids))
        own.append(_value(logprobs[token_id]))
        alternatives: dict[str, float] = {}
        for other, item in _ranked(logprobs):
            alternatives.setdefault(_name(other, item, as_ids), _value(item))
        top.append(alternatives)
    return CompletionLogprobs(text_offset=list(offsets), token_logprobs=own, tokens=names, top_logprobs=top)


def prompt_logprobs(found: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """Those of a prompt in vLLM's form."""
    if found is None:
        return None
    return [
        None if item is None else {str(token): _entry(logprob) for token, logprob in item.items()} for item in found
    ]


def _entry(item: Logprob) -> dict[str, Any]:
    return {"logprob": _value(item), "rank": item.rank, "decoded_token": item.decoded_token}


def _chat_token(token_id: int, item: Logprob, as_ids: bool) -> dict[str, Any]:
    text = item.decoded_token
    return {
        "token": _name(token_id, item, as_ids),
        "logprob": _value(item),
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }


def _ranked(logprobs: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda pair: pair[1].rank)


def _name(token_id: int, item: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else item.decoded_token


def _value(item: Logprob) -> float:
    return max(item.logprob, _LEAST)

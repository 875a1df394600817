"""The bodies of answers: OpenAI's own types, and what vLLM's server and this one add to them.

Fields that are not set are not written, so a body has what its maker gave it.
"""

from __future__ import annotations

from typing import Any

from openai.types import Completion as OpenAICompletion
from openai.types import CompletionChoice as OpenAICompletionChoice
from openai.types.chat import ChatCompletion as OpenAIChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChatCompletionChunk
from openai.types.chat import ChatCompletionMessage as OpenAIMessage
from openai.types.chat.chat_completion import Choice as OpenAIChoice
from openai.types.chat.chat_completion_chunk import Choice as OpenAIChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta as OpenAIDelta
from openai.types.completion_choice import Logprobs as OpenAICompletionLogprobs
from pydantic import BaseModel

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Metrics",
    "Pieces",
    "PromptLogprobs",
    "SpeculativeDecoding",
    "as_json",
]

PromptLogprobs = list[dict[str, Any] | None]
"""vLLM's form: {token id: {"logprob", "rank", "decoded_token"}} for every token, None for the first."""


class SpeculativeDecoding(BaseModel):
    """What speculation did for one answer; vLLM's names and definitions."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(BaseModel):
    """`metrics` of an answer."""

    speculative_decoding: SpeculativeDecoding | None


class Pieces(BaseModel):
    """`outpace` of a chunk: text token by token, each with its drafter, None for the model's own."""

    pieces: list[tuple[str, str | None]]


class ChatMessage(OpenAIMessage):
    reasoning_content: str | None = None


class ChatChoice(OpenAIChoice):
    message: ChatMessage
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(OpenAIChatCompletion):
    choices: list[ChatChoice]  # type: ignore[assignment]  # lists are invariant; these are only read
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    metrics: Metrics | None = None


class ChatDelta(OpenAIDelta):
    reasoning_content: str | None = None


class ChatChunkChoice(OpenAIChunkChoice):
    delta: ChatDelta
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(OpenAIChatCompletionChunk):
    choices: list[ChatChunkChoice]  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None
    metrics: Metrics | None = None
    outpace: Pieces | None = None


class CompletionLogprobs(OpenAICompletionLogprobs):
    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]  # the first of a prompt has none
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class CompletionChoice(OpenAICompletionChoice):
    finish_reason: str | None = None  # type: ignore[assignment]  # None in all chunks of a stream but the last
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(OpenAICompletion):
    choices: list[CompletionChoice]  # type: ignore[assignment]
    metrics: Metrics | None = None
    outpace: Pieces | None = None


def as_json(body: BaseModel) -> bytes:
    """A body on one line."""
    return body.model_dump_json(exclude_unset=True).encode()


for _body in (ChatCompletion, ChatChunk, Completion):
    _body.model_rebuild()  # OpenAI's types put this off, and the first client would wait for it

"""The bodies of requests: what they may hold, and what it means for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from outpace.checks import check_field, shown
from outpace.errors import InvalidParameter
from outpace.params import SamplingParams, SpeculationParams
from outpace.refused import known_arguments
from outpace.server.errors import ApiError, as_api_error
from outpace.server.fields import CHAT_IGNORED, CHAT_REFUSED, COMPLETION_IGNORED, COMPLETION_REFUSED, Refusal
from outpace.server.response_format import response_structure
from outpace.structured import StructuredOutputs

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "sampling_names"]

_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say: OpenAI's and vLLM's."""
_ID = r"^[\x21-\x7e]{1,128}$"

P = TypeVar("P", SpeculationParams, StructuredOutputs)


class Part(BaseModel):
    """A part of a body: nothing is converted, nothing unknown is let pass."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Part):
    """`stream_options`."""

    include_usage: bool = Field(default=False, description="send the counts of tokens at the end of the stream")
    continuous_usage_stats: bool = Field(default=False, description="and in every chunk the counts so far")
    include_obfuscation: bool = Field(default=False, description="ignored: chunks are never padded")


class OutpaceOptions(Part):
    """`outpace`."""

    pieces: bool = Field(default=False, description="send the text token by token, each with the drafter it came from")


class Body(BaseModel):
    """What all bodies have in common; subclasses say what else there may be.

    `None` is "left out" for every field.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    _ignored: ClassVar[Mapping[str, str]] = {}
    _refused: ClassVar[Mapping[str, Refusal]] = {}
    _path: ClassVar[str] = ""

    model: str | None = Field(default=None, description="a name of the served model; may be left out")


class GenerationRequest(Body):
    """What both kinds of generation have in common."""

    stream: bool = Field(default=False, description="send the answer as it grows, as server-sent events")
    stream_options: StreamOptions | None = Field(
        default=None, description="with stream: `include_usage`, `continuous_usage_stats`"
    )
    response_format: Any = Field(default=None, description='`{"type": "text"}`, `"json_object"` or `"json_schema"`')
    request_id: str | None = Field(default=None, pattern=_ID, description="the end of the answer's id")
    return_token_ids: bool = Field(default=False, description="send the ids of prompt and answer too")
    return_tokens_as_token_ids: bool = Field(default=False, description="write tokens of logprobs as `token_id:ID`")
    speculative: dict[str, Any] | None = Field(
        default=None,
        description="how to speculate: `enabled`, `num_speculative_tokens`, `method`; never changes the text",
    )
    outpace: OutpaceOptions = Field(
        default=OutpaceOptions(), description="`pieces`: true sends `[[text, source], ...]` in every chunk"
    )
    store: bool = Field(default=True, description="false keeps the answer out of what `--record` writes")
    _sampling: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether `prompt_logprobs` are part of the answer."""
        return self._sampling.get("prompt_logprobs") is not None

    @property
    def may_be_recorded(self) -> bool:
        """Whether the answer may be kept, where answers are kept."""
        return self.store

    def names(self) -> list[str]:
        """Fields of the body that are honoured."""
        return [*type(self).model_fields, *sampling_names(type(self))]

    def speculation(self) -> SpeculationParams | None:
        """How to speculate; None follows the engine.

        Raises:
            ApiError: 400.
        """
        return None if self.speculative is None else _part_of("speculative", SpeculationParams, self.speculative)

    def sampling(self, seed: int | None) -> SamplingParams:
        """The sampling parameters, with this seed if the request has none.

        Raises:
            ApiError: 400.
        """
        given = self._sampling
        try:
            structure = response_structure(self.response_format)
            if structure is not None and given.get("structured_outputs") is not None:
                message = "response_format and structured_outputs are not possible together: send one of them"
                raise ApiError(400, message, param="structured_outputs")
            if structure is None:
                structure = given.get("structured_outputs")
                if isinstance(structure, Mapping):
                    structure = _part_of("structured_outputs", StructuredOutputs, structure)
            own = {"structured_outputs": structure, **self._own_sampling()}
            return SamplingParams.from_mapping({"seed": seed, **given, **own})
        except InvalidParameter as error:
            raise as_api_error(error, self.names()) from error

    def _own_sampling(self) -> dict[str, Any]:
        """Sampling parameters that go by other names or meanings in this body."""
        return {}

    def check(self) -> None:
        """What pydantic does not see.

        Raises:
            ApiError: 400.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options are not possible without stream: true", param="stream_options")
        if self.wants_prompt_logprobs and self.stream:
            message = "prompt_logprobs are not possible with stream: leave out one"
            raise ApiError(400, message, param="prompt_logprobs")


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    _ignored = CHAT_IGNORED
    _refused = CHAT_REFUSED
    _path = "/v1/chat/completions"

    messages: list[dict[str, Any]] = Field(description="the conversation; contents are text, or lists of text parts")
    max_completion_tokens: Any = Field(default=None, description="the newer name of `max_tokens`")
    logprobs: bool = Field(default=False, description="return the log probability of every token")
    top_logprobs: int | None = Field(default=None, description="with logprobs: and of this many most likely ones")
    tools: list[Any] | None = Field(default=None, description="functions that the model may call")
    tool_choice: Any = Field(default=None, description='`"none"`, `"auto"`, `"required"` or a named function')
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call an answer")
    include_reasoning: bool = Field(default=True, description="false leaves `reasoning_content` out of the answer")
    reasoning_effort: str | None = Field(
        default=None, description="for chat templates that read it; refused with others"
    )
    documents: list[dict[str, Any]] | None = Field(
        default=None, description="for chat templates that read them; refused with others"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables of the chat template, as `enable_thinking`"
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="begin the assistant's turn; true unless continued"
    )
    continue_final_message: bool = Field(
        default=False, description="go on with the last message instead of answering it"
    )
    echo: bool = Field(default=False, description="begin the answer with the last message, if it is the assistant's")

    def _own_sampling(self) -> dict[str, Any]:
        given = self._sampling.get("max_tokens")
        most = check_field(SamplingParams, "max_tokens", self.max_completion_tokens, "max_completion_tokens")
        if most is not None and given is not None and most != given:
            raise InvalidParameter(f"max_tokens={shown(given)} is not max_completion_tokens={most}: send one of them")
        alternatives = check_field(SamplingParams, "logprobs", self.top_logprobs or 0, "top_logprobs")
        return {
            "max_tokens": given if most is None else most,
            "logprobs": alternatives if self.logprobs else None,
        }

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs are not possible without logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "add_generation_prompt and continue_final_message are not possible together: send one of them"
            raise ApiError(400, message, param="continue_final_message")


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    _ignored = COMPLETION_IGNORED
    _refused = COMPLETION_REFUSED
    _path = "/v1/completions"

    prompt: Any = Field(description="text, token ids, or a list of either")
    logprobs: int | None = Field(
        default=None, description="return the log probability of every token and of this many most likely ones"
    )
    echo: bool = Field(default=False, description="begin the answer with the prompt; `max_tokens` may then be 0")
    add_special_tokens: bool = Field(default=True, description="false: no BOS in front of text")

    @property
    def may_be_recorded(self) -> bool:
        return self.store and not self.scores_only

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated: the one token that the engine computes is left out."""
        return self.echo and type(self._sampling.get("max_tokens")) is int and self._sampling["max_tokens"] == 0

    def _own_sampling(self) -> dict[str, Any]:
        given = self._sampling
        least = given.get("min_tokens")
        default = max(_COMPLETION_TOKENS, least) if type(least) is int else _COMPLETION_TOKENS
        own: dict[str, Any] = {"logprobs": self.logprobs, "max_tokens": given.get("max_tokens", default)}
        if self.scores_only:
            own |= {"max_tokens": 1, "min_tokens": 0}
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = self.logprobs
        return own

    def check(self) -> None:
        super().check()
        if self.logprobs is not None and self.echo and self.stream:
            raise ApiError(400, "echo with logprobs is not possible with stream: leave out one", param="echo")


def sampling_names(body: type[Body]) -> list[str]:
    """Fields of a body that are sampling parameters, under their own names."""
    if not issubclass(body, GenerationRequest):
        return []
    names = [item.name for item in fields(SamplingParams)]
    return [name for name in names if name not in body.model_fields and name not in body._refused]


def _part_of(field: str, kind: type[P], given: Mapping[str, Any]) -> P:
    """What an object in a body says, as a parameter of this kind.

    Raises:
        ApiError: 400, naming the field and its key.
        InvalidParameter: which names them too.
    """
    known = [item.name for item in fields(kind)]
    try:
        return kind(**known_arguments(kind, given))
    except InvalidParameter as error:
        if str(error).startswith(field):
            raise  # it names the key itself
        message = str(error).replace(f"{kind.__name__} has no", "there is no")
        blamed = next((name for name in given if message.startswith((f"{name}=", f"there is no {shown(name)};"))), None)
        param = field if blamed is None else f"{field}.{blamed}"
        code = None if blamed is None or blamed in known else "unknown_parameter"
        raise ApiError(400, f"{field}: {message}", param=param, code=code) from error

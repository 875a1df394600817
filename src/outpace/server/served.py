"""What is served: a model's names, its chat template, and how it writes tool calls and reasoning."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import outpace
from outpace.async_llm import AsyncLLM
from outpace.errors import BadInput, InvalidParameter
from outpace.models.chat_template import TemplateSyntaxError, compile_template
from outpace.models.checkpoint import first_line
from outpace.models.tokenizer import Tokenizer
from outpace.params import SamplingParams
from outpace.server.errors import ApiError
from outpace.server.reasoning import check_reasoning, detect_reasoning
from outpace.server.recording import Recorder
from outpace.server.settings import ServerSettings
from outpace.server.swapping import Swapper
from outpace.server.tools import check_format, detect_format

__all__ = ["Served", "check_template", "serve_model"]


@dataclass(frozen=True, slots=True)
class Served:
    """What the endpoints have in common.

    Args:
        llm: the engine's front.
        settings: of the server.
        names: under which the model may be asked for; answers carry the first.
        template: text of its chat templates, "" if it has none.
        tool_format: how it writes tool calls; None if that is not known.
        reasoning_format: how it marks its reasoning; None if it does not.
        created: Unix time at which it was loaded.
        fingerprint: what answers carry as `system_fingerprint`.
        longest_token: characters of the longest token in the vocabulary.
        recorder: takes finished answers; None where none are recorded.
        swapper: takes new drafters; None where none are taken.
    """

    llm: AsyncLLM
    settings: ServerSettings
    names: tuple[str, ...]
    template: str
    tool_format: str | None
    reasoning_format: str | None
    created: int
    fingerprint: str
    longest_token: int
    recorder: Recorder | None = None
    swapper: Swapper | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request, prompt and answer."""
        return self.llm.built.config.max_model_len

    def check_length(self, label: str, text: str, params: SamplingParams) -> None:
        """Lets texts pass that may fit, so that no thread is busy for many seconds with one that cannot.

        Args:
            label: what the request calls it.
            text: of a prompt, or a part of one.
            params: of the request; a prompt that is cut may be of any length.

        Raises:
            ApiError: 400.
        """
        if self.max_model_len is None or params.truncate_prompt_tokens is not None:
            return
        most = self.max_model_len * self.longest_token
        if len(text) > most:
            message = (
                f"{label} has {len(text)} characters, and the context of {self.max_model_len} tokens holds at most "
                f"{most}: shorten it, or set truncate_prompt_tokens"
            )
            raise ApiError(400, message, param=label, code="context_length_exceeded")

    def check_name(self, name: str | None) -> None:
        """Lets requests pass that name the model, or none.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.names:
            there_are = ", ".join(repr(known) for known in self.names)
            message = f"the model {name!r} is not served here: there is {there_are}"
            raise ApiError(404, message, param="model", code="model_not_found")


def serve_model(llm: AsyncLLM, settings: ServerSettings, recorder: Recorder | None = None) -> Served:
    """Puts together what the endpoints need. A chat template of the settings replaces the model's own.

    Raises:
        InvalidParameter: a parser of the settings is not known.
    """
    if settings.chat_template is not None:
        llm.tokenizer = llm.tokenizer.with_chat_template(settings.chat_template)
    template = "\n".join(llm.tokenizer.chat_templates.values())
    _warm_up(llm.tokenizer)
    place = settings.swap_drafters_from
    tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
    return Served(
        llm=llm,
        settings=settings,
        names=settings.served_model_names or (llm.built.config.model,),
        template=template,
        tool_format=detect_format(template) if tools is None else check_format(tools),
        reasoning_format=detect_reasoning(template) if reasoning is None else check_reasoning(reasoning),
        created=int(time.time()),
        fingerprint=f"outpace-{outpace.__version__}",
        longest_token=max(map(len, llm.tokenizer.vocab), default=1),
        recorder=recorder,
        swapper=None if place is None else Swapper(llm, Path(place), recorder),
    )


def check_template(template: str) -> None:
    """Lets a chat template pass that can be read; whether it can render the messages of a request depends on them.

    Raises:
        InvalidParameter: its syntax is wrong.
    """
    try:
        compile_template(template)
    except TemplateSyntaxError as error:
        raise InvalidParameter(f"--chat-template cannot be read: line {error.lineno}: {first_line(error)}") from error


def _warm_up(tokenizer: Tokenizer) -> None:
    """The first client is not to wait until a template is compiled."""
    if tokenizer.has_chat_template:
        with suppress(BadInput):  # a template may want other messages
            tokenizer.render_chat([{"role": "user", "content": "Hello"}])

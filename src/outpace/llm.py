"""The blocking front: a model, its tokenizer and an engine behind `generate`, `chat` and `stream`."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from outpace.build import Built, Notify, Progress, build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.decisions import ControlReport
from outpace.engine.engine import Engine
from outpace.engine.outputs import RequestOutput, StepOutput, StreamChunk
from outpace.engine.request import Request
from outpace.errors import InvalidParameter, InvalidPrompt, OutpaceError, RequestFailed
from outpace.params import SamplingParams, SpeculationParams
from outpace.prompts import Messages, Prompt, as_prompts, encode_prompt, is_conversation, prepare_choices

__all__ = ["LLM", "Messages", "Prompt"]


class LLM:
    """Answers prompts with a local model, faster through speculation and with the same words.

        llm = LLM("smollm2-135m", speculative_config="ngram")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

    Args:
        model: a hub id, folder, GGUF file or alias, as text or a path; or an EngineConfig.
        speculative_config: `auto`, `ngram`, `self` or `self:E`, `none`, a draft model, a mapping with the keys of
            SpeculativeConfig, or a SpeculativeConfig. A list loads several drafters, the first being the default.
        speculative: the same, under the name of the configuration objects.
        front: "api" or "cli": which defaults sampling parameters have where neither the caller nor the model says.
        notify: takes notes for people (what is being converted, what a probe found).
        progress: takes (what, done, total) of long steps.
        options: further fields of EngineConfig.

    Raises:
        OutpaceError: the model cannot be found, read, run or held in memory; see `outpace.errors`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        speculative_config: Any = "auto",
        *,
        speculative: Any = None,
        front: str = "api",
        notify: Notify | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            if options:
                raise InvalidParameter(f"options {sorted(options)} belong into the EngineConfig given")
            config = model
        else:
            known = EngineConfig.__dataclass_fields__
            unknown = sorted(set(options) - set(known))
            if unknown:
                raise InvalidParameter(f"LLM has no option {unknown[0]!r}; known: {', '.join(known)}")
            config = EngineConfig(model=_as_text(model), **options)
        configs = _speculative_configs(speculative_config if speculative is None else speculative)
        self._built: Built = build(config, configs, front=front, notify=notify, progress=progress)
        self._engine = self._built.engine
        weakref.finalize(self, self._built.close)  # also when the interpreter ends
        self._mail: dict[int, deque[StepOutput]] = {}
        self.tokenizer = self._built.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts side by side. Returns their outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each is text or token ids.
            sampling_params: for all prompts, or one for each.
            speculation: whether and how to speculate; None follows the engine.

        Raises:
            BadInput: a prompt or parameter is not possible; nothing is generated then.
            RequestFailed: a request failed inside the engine (a logits processor raised, say); the outputs of the
                others are in its `outputs`.
        """
        many = as_prompts(prompts)
        each = _for_each(sampling_params, len(many))
        groups = [self._prepare(prompt, p, speculation) for prompt, p in zip(many, each, strict=True)]
        requests = [request for group in groups for request in group]
        try:
            for request in requests:
                self._submit(request)
            for request in requests:
                while not self._next(request.id).finish_reason:
                    continue
            return self._take_all(groups, many)
        finally:
            for request in requests:
                self._drop(request.id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        Raises:
            BadInput: the model has no chat template, or it does not take these messages.
        """
        conversations = messages if _is_many(messages) else [messages]
        return self.generate([self.encode_chat(m) for m in conversations], sampling_params, speculation)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Yields what each step brings, all n choices side by side. Leaving the loop early ends the request.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: None takes the defaults.
            speculation: None follows the engine.

        Raises:
            BadInput: at once, before the first chunk is asked for.
        """
        plain: Prompt = self.encode_chat(prompt) if is_conversation(prompt) else prompt  # type: ignore[arg-type,assignment]
        return self._stream(self._prepare(plain, sampling_params, speculation), plain)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ending where the answer begins.

        Raises:
            BadInput: the model has no chat template, or it does not take these messages.
        """
        if not isinstance(messages, Sequence):
            raise InvalidPrompt(f"messages={messages!r} are not possible: give a list of them")
        return self.tokenizer.encode_chat(messages)

    @property
    def engine(self) -> Engine:
        """The engine itself, for measurements; requests go through `generate`, `chat` and `stream`."""
        return self._engine

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self.tokenizer.has_chat_template

    def describe(self) -> dict[str, Any]:
        """Every setting in force, JSON-able."""
        return self._built.describe()

    def banner(self) -> str:
        """One line: the model, its size and precision with its bits, the drafter, the threads."""
        return self._built.banner()

    def memory(self) -> dict[str, int]:
        """Bytes held by target, drafter and cache."""
        return self._engine.memory()

    def control(self) -> ControlReport:
        """What drafts brought and cost since the model was loaded, and why somebody is not asked for them."""
        return self._engine.steering.controller.report()

    def floor_seconds(self) -> float:
        """Time in which this machine can read the weights once: no plain token comes faster at this precision."""
        return self._built.floor_seconds()

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What parameters left at None mean here."""
        return SamplingParams().resolved(self._built.defaults)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, speculation: SpeculationParams | None
    ) -> list[Request]:
        """One for each of the n choices; they share a seed if one is given, and draw different noise from it."""
        return prepare_choices(self._built, encode_prompt(self.tokenizer, prompt), params, speculation)

    def _submit(self, request: Request) -> None:
        self._mail[request.id] = deque()
        self._engine.submit(request)

    def _next(self, request_id: int) -> StepOutput:
        """The request's next output. Steps serve everybody, so what others got waits for them."""
        mail = self._mail[request_id]
        while not mail:
            self._step()
        return mail.popleft()

    def _step(self) -> None:
        outputs = self._engine.step()
        if not outputs:
            raise OutpaceError("the request was interrupted: ask again")
        for output in outputs:
            self._mail[output.request_id].append(output)

    def _drop(self, request_id: int) -> None:
        self._mail.pop(request_id, None)
        self._engine.abort(request_id)

    def _stream(self, group: list[Request], prompt: Prompt) -> Generator[StreamChunk, None, None]:
        for request in group:
            self._submit(request)
        going_on = {request.id: request for request in group}
        try:
            while going_on:
                while not any(self._mail[request_id] for request_id in going_on):
                    self._step()
                for request in list(going_on.values()):
                    while self._mail[request.id]:
                        step = self._mail[request.id].popleft()
                        if step.finish_reason:
                            del going_on[request.id]
                        if step.pieces or step.prefill or step.finish_reason:
                            output = None if going_on else self._take(group, prompt)
                            yield StreamChunk.of(step, request.number, output, request.stop_reason)
        finally:
            for request in group:
                self._drop(request.id)

    def _take_all(self, groups: Sequence[Sequence[Request]], prompts: Sequence[Prompt]) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = []
        failures: list[str] = []
        for number, (group, prompt) in enumerate(zip(groups, prompts, strict=True), 1):
            try:
                outputs.append(self._take(group, prompt))
            except RequestFailed as error:
                outputs.append(None)
                failures.append(f"prompt {number} of {len(prompts)}: {error}" if len(prompts) > 1 else str(error))
        if failures:
            raise RequestFailed(failures[0], outputs)
        return [output for output in outputs if output is not None]

    def _take(self, group: Sequence[Request], prompt: Prompt) -> RequestOutput:
        """The choices of one request, joined."""
        choices = [self._engine.take(request.id) for request in group]
        return RequestOutput.joined(choices, prompt if isinstance(prompt, str) else None)


def _speculative_configs(value: Any) -> list[SpeculativeConfig]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [SpeculativeConfig.parse(_with_text(item)) for item in values]


def _with_text(item: Any) -> Any:
    """Settings of a drafter, or its model alone, with text for every path."""
    if isinstance(item, Mapping):
        return {key: _as_text(value) for key, value in item.items()}
    return _as_text(item)


def _as_text(value: Any) -> Any:
    """A path as text; anything else as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    """One for every prompt."""
    if not isinstance(params, (list, tuple)):
        return [params] * count  # type: ignore[list-item]
    if len(params) != count:
        raise InvalidParameter(f"{len(params)} sampling_params do not go with {count} prompts: give one, or as many")
    return params


def _is_many(messages: Any) -> bool:
    """Several conversations rather than one: a list of lists."""
    return isinstance(messages, (list, tuple)) and len(messages) > 0 and isinstance(messages[0], (list, tuple))

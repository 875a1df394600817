"""The blocking front: a model, its tokenizer and an engine behind `generate`, `chat` and `stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outpace.build import Built, Notify, Progress, build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.engine.outputs import RequestOutput, StepOutput, StreamChunk
from outpace.engine.request import Request
from outpace.errors import InvalidParameter
from outpace.params import SamplingParams, SpeculationParams

__all__ = ["LLM", "Messages", "Prompt"]

Messages = Sequence[Mapping[str, Any]]
"""A conversation in the OpenAI form: [{"role": "user", "content": "..."}, ...]."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """Answers prompts with a local model, faster through speculation and with the same words.

        llm = LLM("smollm2-135m", speculative_config="ngram")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

    Args:
        model: a hub id, folder, GGUF file or alias; or an EngineConfig.
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
        model: str | EngineConfig,
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
            try:
                config = EngineConfig(model=model, **options)
            except TypeError:
                unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
                raise InvalidParameter(
                    f"LLM has no option {unknown[0]!r}; known: {', '.join(EngineConfig.__dataclass_fields__)}"
                ) from None
        configs = _speculative_configs(speculative_config if speculative is None else speculative)
        self._built: Built = build(config, configs, front=front, notify=notify, progress=progress)
        self._engine = self._built.engine
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
        """
        many = _as_list(prompts)
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            each: Sequence[SamplingParams | None] = [sampling_params] * len(many)
        else:
            each = sampling_params
        if len(each) != len(many):
            raise InvalidParameter(
                f"{len(each)} sampling_params do not go with {len(many)} prompts: give one, or as many"
            )
        requests = [self._prepare(prompt, p, speculation) for prompt, p in zip(many, each, strict=True)]
        try:
            for request in requests:
                self._submit(request)
            for request in requests:
                while not self._next(request.id).finish_reason:
                    continue
            return [self._take(request.id, prompt) for request, prompt in zip(requests, many, strict=True)]
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
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.encode_chat(m) for m in conversations], sampling_params, speculation)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Yields what each step brings. Leaving the loop early ends the request.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            sampling_params: None takes the defaults.
            speculation: None follows the engine.

        Raises:
            BadInput: at once, before the first chunk is asked for.
        """
        plain: Prompt = self.encode_chat(prompt) if _is_conversation(prompt) else prompt  # type: ignore[arg-type,assignment]
        return self._stream(self._prepare(plain, sampling_params, speculation), plain)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ending where the answer begins.

        Raises:
            BadInput: the model has no chat template, or it does not take these messages.
        """
        return self.tokenizer.encode_chat([dict(message) for message in messages])

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

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What parameters left at None mean here."""
        return SamplingParams().resolved(self._built.defaults)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, speculation: SpeculationParams | None) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._engine.prepare(ids, (params or SamplingParams()).resolved(self._built.defaults), speculation)

    def _submit(self, request: Request) -> None:
        self._mail[request.id] = deque()
        self._engine.submit(request)

    def _next(self, request_id: int) -> StepOutput:
        """The request's next output. Steps serve everybody, so what others got waits for them."""
        mail = self._mail[request_id]
        while not mail:
            for output in self._engine.step():
                self._mail[output.request_id].append(output)
        return mail.popleft()

    def _drop(self, request_id: int) -> None:
        self._engine.abort(request_id)
        self._mail.pop(request_id, None)

    def _stream(self, request: Request, prompt: Prompt) -> Generator[StreamChunk, None, None]:
        self._submit(request)
        try:
            finished = False
            while not finished:
                step = self._next(request.id)
                finished = step.finish_reason is not None
                if step.pieces or step.prefill or finished:
                    yield StreamChunk(
                        text="".join(piece.text for piece in step.pieces),
                        token_ids=[piece.token_id for piece in step.pieces],
                        pieces=step.pieces,
                        prefill=step.prefill,
                        finished=finished,
                        output=self._take(request.id, prompt) if finished else None,
                    )
        finally:
            self._drop(request.id)

    def _take(self, request_id: int, prompt: Prompt) -> RequestOutput:
        output = self._engine.take(request_id)
        return replace(output, prompt=prompt if isinstance(prompt, str) else None)


def _speculative_configs(value: Any) -> list[SpeculativeConfig]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [SpeculativeConfig.parse(item) for item in values]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_conversation(prompt: Prompt | Messages) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)

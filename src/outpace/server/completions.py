"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from outpace.engine.outputs import CompletionOutput, RequestOutput
from outpace.server.bodies import Completion, CompletionChoice, CompletionLogprobs
from outpace.server.completion_call import CompletionCall, prepare_completion
from outpace.server.completion_stream import CompletionStream
from outpace.server.envelope import answer, log_answers, read, served_by
from outpace.server.limits import tenant_of
from outpace.server.logprobs import completion_logprobs, prompt_logprobs
from outpace.server.requests import CompletionRequest
from outpace.server.usage import metrics_of

__all__ = ["completions"]


async def completions(request: Request) -> Response:
    """Continues texts."""
    body = await read(request, CompletionRequest)
    served = served_by(request)
    call = await prepare_completion(served, body, tenant_of(request, served.settings))
    stream = CompletionStream(call).bodies if body.stream else None
    return await answer(request, body, call.prepared, stream, lambda outputs: _whole(call, outputs))


def _whole(call: CompletionCall, outputs: Sequence[RequestOutput]) -> Completion:
    """The body of an answer that is not streamed."""
    log_answers(call.served, call.envelope, outputs)
    choices = [
        _choice(call, number, output, choice) for number, output in enumerate(outputs) for choice in output.outputs
    ]
    return Completion(
        **call.envelope.fields(),
        object="text_completion",
        choices=choices,
        usage=call.usage_of(outputs),
        metrics=metrics_of(outputs, call.most),
    )


def _choice(call: CompletionCall, number: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
    request = call.body
    text, ids = ("", []) if request.scores_only else (choice.text, choice.token_ids)
    echoed = call.echoed(number)
    body = CompletionChoice(
        index=call.index(number, choice.index),
        text=echoed + text,
        logprobs=None,
        finish_reason="length" if request.scores_only else choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
    if choice.logprobs is not None:
        body.logprobs = _logprobs(call, output, choice, len(echoed), len(text))
    if request.wants_prompt_logprobs:
        body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    if request.return_token_ids:
        body.token_ids = ids
        body.prompt_token_ids = output.prompt_token_ids
    return body


def _logprobs(
    call: CompletionCall, output: RequestOutput, choice: CompletionOutput, start: int, length: int
) -> CompletionLogprobs:
    """Of the echoed prompt and of the answer, which has `length` characters from `start` on."""
    tokenizer = call.served.llm.tokenizer
    tokens: list[tuple[int, Any]] = []
    offsets: list[int] = []
    prompt = output.prompt_token_ids
    if call.body.echo:
        tokens += zip(prompt, output.prompt_logprobs or [None] * len(prompt), strict=True)
        offsets += call.offsets(prompt, [], 0, start)
    if not call.body.scores_only:
        tokens += zip(choice.token_ids, choice.logprobs or [], strict=True)
        offsets += call.offsets(choice.token_ids, prompt, start, start + length)
    return completion_logprobs(
        tokens,
        offsets,
        lambda token: tokenizer.decode([token], skip_special_tokens=False),
        as_ids=call.body.return_tokens_as_token_ids,
    )

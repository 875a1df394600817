"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request, Response
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from outpace.engine.outputs import CompletionOutput, RequestOutput
from outpace.server.bodies import ChatChoice, ChatCompletion, ChatMessage
from outpace.server.chat_call import ChatCall, prepare_chat
from outpace.server.chat_stream import ChatStream
from outpace.server.envelope import answer, log_answers, read, served_by
from outpace.server.limits import tenant_of
from outpace.server.logprobs import chat_logprobs, prompt_logprobs
from outpace.server.requests import ChatRequest
from outpace.server.usage import metrics_of, usage_of

__all__ = ["chat_completions"]


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    body = await read(request, ChatRequest)
    served = served_by(request)
    call = await prepare_chat(served, body, tenant_of(request, served.settings))
    stream = ChatStream(call).bodies if body.stream else None
    return await answer(request, body, [call.prepared], stream, lambda outputs: _whole(call, outputs))


def _whole(call: ChatCall, outputs: Sequence[RequestOutput]) -> ChatCompletion:
    """The body of an answer that is not streamed."""
    log_answers(call.served, call.envelope, outputs)
    output = outputs[0]
    body = ChatCompletion(
        **call.envelope.fields(),
        object="chat.completion",
        choices=[_choice(call, choice) for choice in output.outputs],
        usage=usage_of(outputs),
        metrics=metrics_of(outputs, call.most),
    )
    if call.body.wants_prompt_logprobs:
        body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    if call.body.return_token_ids:
        body.prompt_token_ids = output.prompt_token_ids
    return body


def _choice(call: ChatCall, choice: CompletionOutput) -> ChatChoice:
    found = call.reader(whole=True).read(choice.text)
    content = call.echoed + found.content
    message = ChatMessage(role="assistant", content=content if content or not found.calls else None, refusal=None)
    if found.reasoning is not None and call.body.include_reasoning:
        message.reasoning_content = found.reasoning
    if found.calls:
        message.tool_calls = [
            ChatCompletionMessageFunctionToolCall(
                id=item.id, type="function", function=Function(name=item.name, arguments=item.arguments)
            )
            for item in found.calls
        ]
    body = ChatChoice(
        index=choice.index,
        message=message,
        logprobs=None,
        finish_reason=call.finish_reason(choice.finish_reason, bool(found.calls)),
        stop_reason=choice.stop_reason,
    )
    if choice.logprobs is not None:
        tokens = zip(choice.token_ids, choice.logprobs, strict=True)
        count, as_ids = call.body.top_logprobs or 0, call.body.return_tokens_as_token_ids
        body.logprobs = ChoiceLogprobs(content=chat_logprobs(tokens, count, as_ids=as_ids))
    if call.body.return_token_ids:
        body.token_ids = choice.token_ids
    return body

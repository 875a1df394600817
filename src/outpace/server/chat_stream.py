"""The chunks of a chat answer: its role, what every step brings, why it ended, and the counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from openai.types.chat.chat_completion_chunk import (
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
    ChoiceLogprobs,
)

from outpace.engine.outputs import Piece, RequestOutput, StreamChunk
from outpace.server.answers import AnswerReader, Growth
from outpace.server.bodies import ChatChunk, ChatChunkChoice, ChatDelta
from outpace.server.chat_call import ChatCall
from outpace.server.envelope import log_answers, pieces_of
from outpace.server.logprobs import chat_logprobs
from outpace.server.running import Run
from outpace.server.tools import ToolDelta
from outpace.server.usage import metrics_of, usage, usage_of

__all__ = ["ChatStream"]


@dataclass(slots=True)
class _Choice:
    """One choice so far; `pieces` were not sent yet: their text may still turn out to be part of a marker."""

    reader: AnswerReader
    begun: bool = False
    pieces: list[Piece] = field(default_factory=list)


class ChatStream:
    """Makes the chunks of one request. A chunk with text or calls is a step of one choice.

    Args:
        call: the request.
    """

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._choices = [_Choice(call.reader(whole=False)) for _ in range(call.prepared.num_choices)]
        self._generated = 0
        self._told_prompt = not call.body.return_token_ids

    async def bodies(self, run: Run) -> AsyncGenerator[ChatChunk, None]:
        """All chunks, in order. Raises what `Run.chunks` raises."""
        outputs: list[RequestOutput] = []
        async with aclosing(run.chunks()) as chunks:
            async for _, chunk in chunks:
                for body in self._step(chunk):
                    yield body
                if chunk.output is not None:
                    outputs.append(chunk.output)
        log_answers(self._call.served, self._call.envelope, outputs)
        if self._call.body.include_usage:
            yield ChatChunk(
                **self._call.envelope.fields(),
                object="chat.completion.chunk",
                choices=[],
                usage=usage_of(outputs),
                metrics=metrics_of(outputs, self._call.most),
            )

    def _step(self, chunk: StreamChunk) -> Iterator[ChatChunk]:
        """What is sent after a step of one choice."""
        if not chunk.pieces and not chunk.finished:  # the prompt is being computed
            return
        choice = self._choices[chunk.index]
        choice.pieces += chunk.pieces
        self._generated += len(chunk.token_ids)
        growth = choice.reader.push(chunk.text, last=chunk.finished)
        if not self._call.body.include_reasoning:
            growth = replace(growth, reasoning="")
        if not choice.begun and (growth or chunk.finished):
            choice.begun = True
            yield self._body(ChatChunkChoice(index=chunk.index, delta=ChatDelta(role="assistant", content="")), [])
            if self._call.echoed:
                yield self._body(ChatChunkChoice(index=chunk.index, delta=ChatDelta(content=self._call.echoed)), [])
        if growth:
            yield self._with_pieces(ChatChunkChoice(index=chunk.index, delta=_delta(growth)), choice)
        if chunk.finished:
            reason = self._call.finish_reason(chunk.finish_reason or "stop", choice.reader.has_calls)
            last = ChatChunkChoice(index=chunk.index, delta=ChatDelta(), finish_reason=reason)
            last.stop_reason = chunk.stop_reason
            yield self._with_pieces(last, choice)

    def _with_pieces(self, body: ChatChunkChoice, choice: _Choice) -> ChatChunk:
        """A chunk with the tokens that were not sent yet."""
        pieces, choice.pieces = choice.pieces, []
        request = self._call.body
        if request.logprobs and pieces:
            tokens = ((piece.token_id, piece.logprobs) for piece in pieces)
            content = chat_logprobs(tokens, request.top_logprobs or 0, as_ids=request.return_tokens_as_token_ids)
            body.logprobs = ChoiceLogprobs(content=content)
        if request.return_token_ids:
            body.token_ids = [piece.token_id for piece in pieces]
        return self._body(body, pieces)

    def _body(self, choice: ChatChunkChoice, pieces: list[Piece]) -> ChatChunk:
        for name in ("logprobs", "finish_reason"):  # written in every chunk, as null too
            setattr(choice, name, getattr(choice, name))
        call = self._call
        body = ChatChunk(**call.envelope.fields(), object="chat.completion.chunk", choices=[choice])
        if call.body.include_usage:
            so_far = usage(len(call.prepared.prompt_token_ids), self._generated)
            body.usage = so_far if call.body.continuous_usage else None
        if call.body.outpace.pieces and pieces:
            body.outpace = pieces_of(pieces)
        if not self._told_prompt:
            self._told_prompt = True
            body.prompt_token_ids = call.prepared.prompt_token_ids
        return body


def _delta(growth: Growth) -> ChatDelta:
    delta = ChatDelta()
    if growth.reasoning:
        delta.reasoning_content = growth.reasoning
    if growth.content:
        delta.content = growth.content
    if growth.calls:
        delta.tool_calls = [_call_delta(item) for item in growth.calls]
    return delta


def _call_delta(item: ToolDelta) -> ChoiceDeltaToolCall:
    if item.id is None:
        return ChoiceDeltaToolCall(index=item.index, function=ChoiceDeltaToolCallFunction(arguments=item.arguments))
    function = ChoiceDeltaToolCallFunction(name=item.name, arguments=item.arguments)
    return ChoiceDeltaToolCall(index=item.index, id=item.id, type="function", function=function)

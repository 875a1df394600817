"""The chunks of a completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from outpace.engine.outputs import RequestOutput, StreamChunk
from outpace.server.bodies import Completion, CompletionChoice, CompletionLogprobs
from outpace.server.completion_call import CompletionCall
from outpace.server.envelope import log_answers, pieces_of
from outpace.server.logprobs import completion_logprobs
from outpace.server.running import Run
from outpace.server.usage import metrics_of, usage

__all__ = ["CompletionStream"]


@dataclass(slots=True)
class _Choice:
    """One choice so far: whether anything was sent, and how many characters were."""

    begun: bool = False
    offset: int = 0


class CompletionStream:
    """Makes the chunks of one request. A chunk is a step of one choice; the last of a choice says why it ended.

    Args:
        call: the request.
    """

    def __init__(self, call: CompletionCall) -> None:
        self._call = call
        self._choices = [_Choice() for _ in range(len(call.prompts) * call.params.n)]
        self._generated = 0

    async def bodies(self, run: Run) -> AsyncGenerator[Completion, None]:
        """All chunks, in order. Raises what `Run.chunks` raises."""
        call = self._call
        outputs: list[RequestOutput] = []
        async with aclosing(run.chunks()) as chunks:
            async for number, chunk in chunks:
                if chunk.pieces or chunk.finished:  # else the prompt is being computed
                    yield self._step(number, chunk)
                if chunk.output is not None:
                    outputs.append(chunk.output)
        log_answers(call.served, call.envelope, outputs)
        if call.body.include_usage:
            yield Completion(
                **call.envelope.fields(),
                object="text_completion",
                choices=[],
                usage=call.usage_of(outputs),
                metrics=metrics_of(outputs, call.most),
            )

    def _step(self, number: int, chunk: StreamChunk) -> Completion:
        call, request = self._call, self._call.body
        index = call.index(number, chunk.index)
        choice = self._choices[index]
        first, choice.begun = not choice.begun, True
        pieces = () if request.scores_only else chunk.pieces
        self._generated += len(pieces)
        text = "".join(piece.text for piece in pieces)
        found = CompletionChoice(
            index=index,
            text=(call.echoed(number) if first else "") + text,
            logprobs=None,
            finish_reason="length" if request.scores_only and chunk.finished else chunk.finish_reason,
        )
        if chunk.finished:
            found.stop_reason = chunk.stop_reason
        if request.logprobs is not None:
            found.logprobs = self._logprobs(chunk, choice)
        if request.return_token_ids:
            found.token_ids = [piece.token_id for piece in pieces]
            if first:
                found.prompt_token_ids = call.prepared[number].prompt_token_ids
        body = Completion(**call.envelope.fields(), object="text_completion", choices=[found])
        if request.include_usage:
            so_far = usage(sum(len(item.prompt_token_ids) for item in call.prepared), self._generated)
            body.usage = so_far if request.continuous_usage else None
        if request.outpace.pieces and pieces:
            body.outpace = pieces_of(pieces)
        return body

    def _logprobs(self, chunk: StreamChunk, choice: _Choice) -> CompletionLogprobs:
        offsets = []
        for piece in chunk.pieces:
            offsets.append(choice.offset)
            choice.offset += len(piece.text)
        tokenizer = self._call.served.llm.tokenizer
        return completion_logprobs(
            ((piece.token_id, piece.logprobs) for piece in chunk.pieces),
            offsets,
            lambda token: tokenizer.decode([token], skip_special_tokens=False),
            as_ids=self._call.body.return_tokens_as_token_ids,
        )

"""One stream from the server beside the same stream from the library in this process: what HTTP costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import httpx
from load_clients import CHAT, Answer, Request, ask

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.server.arguments import resolve


def load_library(options: Sequence[str], say: Callable[[str], None]) -> LLM:
    """The engine that `outpace serve` with these options has, in this process."""
    resolved = resolve(options)
    return LLM(resolved.engine, speculative=resolved.speculative, notify=say)


def stream_from_library(llm: LLM, messages: Any, max_tokens: int, speculative: bool) -> Answer:
    """A greedy answer, with the times at which its parts came."""
    answer = Answer(status=200)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    answer.sent = time.perf_counter()
    for chunk in llm.stream(messages, params, SpeculationParams(enabled=speculative)):
        answer.tokens += len(chunk.token_ids)
        if chunk.text:
            answer.text += chunk.text
            answer.arrivals.append((time.perf_counter(), answer.tokens))
    answer.ended = time.perf_counter()
    return answer


async def measure_overhead(
    client: httpx.AsyncClient,
    llm: LLM,
    prompts: Sequence[Mapping[str, Any]],
    max_tokens: int,
    report: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """Both, prompt by prompt, alternating which goes first; plainly and with drafts.

    Raises:
        RuntimeError: the server did not answer.
    """

    async def served(prompt: Mapping[str, Any], speculative: bool) -> Answer:
        switch = {"enabled": speculative}
        body = {"messages": prompt["messages"], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        answer = await ask(client, Request(CHAT, {**body, "speculative": switch}))
        if answer.error:
            raise RuntimeError(f"the server did not answer {prompt['id']}: {answer.error}")
        return answer

    pairs: dict[bool, list[tuple[Answer, Answer]]] = {False: [], True: []}
    for index, prompt in enumerate([prompts[0], *prompts]):
        for speculative in (False, True):
            answers: dict[str, Answer] = {}
            for who in ("server", "library") if index % 2 else ("library", "server"):
                if who == "server":
                    answers[who] = await served(prompt, speculative)
                else:  # nothing else is to happen in this process meanwhile
                    answers[who] = stream_from_library(llm, prompt["messages"], max_tokens, speculative)
            if index:  # the first time warms up
                pairs[speculative].append((answers["server"], answers["library"]))
        report("server beside library", index, len(prompts))
    return [overhead_row(found, speculative) for speculative, found in pairs.items()]


def overhead_row(pairs: Sequence[tuple[Answer, Answer]], speculative: bool) -> dict[str, Any]:
    """What the server took over what the library took, over (server, library) of every prompt.

    `whole_ratio` compares the time to the last text, `decoding_ratio` the time of a token after the first text, and
    `first_token_more_seconds` is the median difference of the time to the first text.
    """
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    whole = [sum(answer.arrivals[-1][0] - answer.sent for answer in side if answer.arrivals) for side in sides]
    each = [milliseconds_per_token(side) for side in sides]
    first = [(a.first_token_seconds, b.first_token_seconds) for a, b in pairs]
    more = [server - library for server, library in first if server is not None and library is not None]
    return {
        "speculative": speculative,
        "prompts": len(pairs),
        "server_ms_per_token": each[0],
        "library_ms_per_token": each[1],
        "decoding_ratio": each[0] / each[1] if each[0] and each[1] else None,
        "whole_ratio": whole[0] / whole[1] if whole[1] else None,
        "first_token_more_seconds": median(more) if more else None,
        "same_text": all(server.text == library.text for server, library in pairs),
    }


def milliseconds_per_token(answers: Sequence[Answer]) -> float | None:
    """From the first text of every answer to its last; None if nothing came after the first."""
    seconds = sum(answer.decoding[0] for answer in answers)
    tokens = sum(answer.decoding[1] for answer in answers)
    return 1e3 * seconds / tokens if tokens else None

"""Running streams while a long prompt is computed: how long do they stand still?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx
from load_clients import Answer, Request, ask


async def gaps_beside_prefill(
    client: httpx.AsyncClient, streams: Sequence[Request], long_prompt: Request, settle: int = 8
) -> dict[str, Any]:
    """The longest gaps of running streams, quiet and while a long prompt is computed.

    Args:
        client: from `new_client`.
        streams: requests with long answers, whose ends are not awaited.
        long_prompt: a streamed request.
        settle: chunks that every stream has brought before gaps count, and again before the prompt is sent.

    Returns:
        quiet_seconds, prefill_seconds: the longest gap before the prompt was sent, and until its first token.
        first_token_seconds: of the long prompt.
        streams: how many ran all the time.

    Raises:
        RuntimeError: a request failed, or all streams ended too early to say anything.
    """
    answers = [Answer() for _ in streams]
    tasks = [
        asyncio.create_task(ask(client, request, answer)) for request, answer in zip(streams, answers, strict=True)
    ]
    try:
        await _until(tasks, answers, [settle] * len(answers))
        began = time.perf_counter()
        await _until(tasks, answers, [len(answer.arrivals) + settle for answer in answers])
        long = await ask(client, long_prompt)
        if long.error or not long.arrivals:
            raise RuntimeError(f"the long prompt was not answered: {long.error or 'no text came'}")
        first = long.arrivals[0][0]
        running = [answer for answer, task in zip(answers, tasks, strict=True) if not task.done()]
        if not running:
            raise RuntimeError("all streams ended before the long prompt was computed: give them more tokens")
        still = [task for task in tasks if not task.done()]
        await _until(still, running, [len(answer.arrivals) + 1 for answer in running])
        return {
            "streams": len(running),
            "quiet_seconds": longest_gap(running, began, long.sent),
            "prefill_seconds": longest_gap(running, long.sent, first),
            "first_token_seconds": first - long.sent,
        }
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def longest_gap(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Of the gaps that have a part between two moments; 0 if there is none."""
    return max(
        (
            later - earlier
            for answer in answers
            for (earlier, _), (later, _) in pairwise(answer.arrivals)
            if later > begin and earlier < end
        ),
        default=0.0,
    )


async def _until(tasks: Sequence[asyncio.Task[Answer]], answers: Sequence[Answer], counts: Sequence[int]) -> None:
    """Waits until every stream has brought so many chunks, or has ended.

    Raises:
        RuntimeError: one failed.
    """
    while True:
        for task, answer in zip(tasks, answers, strict=True):
            if task.done() and answer.error:
                raise RuntimeError(f"a stream was not answered: {answer.error}")
        if all(
            task.done() or len(answer.arrivals) >= count
            for task, answer, count in zip(tasks, answers, counts, strict=True)
        ):
            return
        await asyncio.sleep(0.005)

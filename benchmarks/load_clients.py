"""Clients of a server: one request and what came of it, and several clients that ask in a closed loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE = 900.0
"""Seconds of silence after which a server counts as dead: a queue of 32 long answers takes its time."""
_JSON = "application/json"

T = TypeVar("T")


@dataclass
class Answer:
    """What came of one request. Times are those of `time.perf_counter`, in seconds.

    Args:
        sent: when the request was.
        ended: when the last byte came, or the client left.
        status: of HTTP; None if there was none.
        left: whether the client went away on purpose.
        error: what the server or the connection said instead of an answer.
        text: of the answer.
        arrivals: (when, tokens of the answer so far) of every chunk that brought text.
        tokens: of the whole answer, the end token included.
        cached_tokens: prompt tokens that were not computed again.
        drafts, draft_tokens, accepted: what speculation did.
    """

    sent: float = 0.0
    ended: float = 0.0
    status: int | None = None
    left: bool = False
    error: str | None = None
    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0

    @property
    def first_token_seconds(self) -> float | None:
        """From sending to the first text."""
        return self.arrivals[0][0] - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks that brought text; a chunk is a step, with one token or with several."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals)]

    @property
    def decoding(self) -> tuple[float, int]:
        """(seconds from the first text to the last, tokens that came in them)."""
        if not self.arrivals:
            return 0.0, 0
        (begun, before), (ended, after) = self.arrivals[0], self.arrivals[-1]
        return ended - begun, after - before


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Args:
        path: where to.
        body: as JSON; {"stream": True, ...} is read as it comes, with counts of tokens.
        content: the body as it is, instead.
        content_type: of it.
        leave_after: go away after so many chunks with text, or, if the answer is not streamed, hundredths of a second.
    """

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    content_type: str = _JSON
    leave_after: int | None = None

    def encoded(self) -> bytes:
        """The body in bytes."""
        if self.content is not None:
            return self.content
        counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return json.dumps({**(counted if self.body.get("stream") else {}), **self.body}).encode()


def new_client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client that many tasks share, each with a connection of its own."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=httpx.Timeout(PATIENCE))


async def ask(client: httpx.AsyncClient, request: Request, answer: Answer | None = None) -> Answer:
    """Sends one request and waits for its end.

    Args:
        client: from `new_client`.
        request: what to send.
        answer: is filled as the answer grows, for others to watch; a new one if None.

    Returns:
        `answer`. Errors of the server and of the connection are in it, never raised.
    """
    answer = Answer() if answer is None else answer
    content, headers = request.encoded(), {"Content-Type": request.content_type}
    answer.sent = time.perf_counter()
    try:
        if request.body.get("stream"):
            async with client.stream("POST", request.path, content=content, headers=headers) as response:
                await _read_stream(response, answer, request.leave_after)
        else:
            limit = None if request.leave_after is None else request.leave_after / 100
            sent = client.post(request.path, content=content, headers=headers)
            _read_whole(await asyncio.wait_for(sent, limit), answer)
    except asyncio.TimeoutError:
        answer.left = True
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


async def _read_stream(response: httpx.Response, answer: Answer, leave_after: int | None) -> None:
    answer.status = response.status_code
    if response.status_code != 200:
        answer.error = (await response.aread()).decode(errors="replace")
        return
    if leave_after == 0:
        answer.left = True
        return
    async with aclosing(response.aiter_lines()) as lines:  # type: ignore[type-var]  # httpx's are generators
        async for line in lines:
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                _read_event(json.loads(line[6:]), answer)
            if leave_after is not None and len(answer.arrivals) >= leave_after:
                answer.left = True
                return
    answer.error = answer.error or "the stream ended without [DONE]"


def _read_event(event: Mapping[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    _count(event, answer)
    text = "".join(_text_of(choice, "delta") for choice in event["choices"])
    if text:
        answer.text += text
        answer.arrivals.append((time.perf_counter(), answer.tokens))


def _read_whole(response: httpx.Response, answer: Answer) -> None:
    answer.status = response.status_code
    if response.status_code != 200:
        answer.error = response.text
        return
    body = response.json()
    _count(body, answer)
    answer.text = "".join(_text_of(choice, "message") for choice in body["choices"])


def _text_of(choice: Mapping[str, Any], part: str) -> str:
    found = choice.get(part, {})
    return str(choice.get("text") or "") + (found.get("reasoning_content") or "") + (found.get("content") or "")


def _count(body: Mapping[str, Any], answer: Answer) -> None:
    usage = body.get("usage") or {}
    answer.tokens = usage.get("completion_tokens", answer.tokens)
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    done = (body.get("metrics") or {}).get("speculative_decoding")
    if done:
        answer.drafts, answer.draft_tokens = done["num_spec_steps"], done["num_draft_tokens"]
        answer.accepted = done["num_accepted_draft_tokens"]


# Several clients.


@dataclass
class Loop(Generic[T]):
    """What clients did together.

    Args:
        done: what was asked and what came of it, in the order in which answers ended.
        began: when the first request was sent.
        busy_until: when a client first found nothing left to ask: until then all were busy.
    """

    done: list[tuple[T, Answer]]
    began: float
    busy_until: float

    @property
    def busy_seconds(self) -> float:
        return self.busy_until - self.began

    @property
    def busy_tokens(self) -> int:
        """Tokens that arrived while all clients were busy."""
        return sum(tokens_until(answer, self.busy_until) for _, answer in self.done)


def tokens_until(answer: Answer, moment: float) -> int:
    """Tokens of a streamed answer that had arrived then."""
    if answer.ended <= moment:
        return answer.tokens
    return max((tokens for when, tokens in answer.arrivals if when <= moment), default=0)


async def closed_loop(
    work: Iterable[T], num_clients: int, send: Callable[[T], Awaitable[Answer]], on_answer: Callable[[], None]
) -> Loop[T]:
    """So many clients, each of which asks for the next thing as soon as it has its answer.

    Args:
        work: what is asked for, in this order.
        num_clients: at least 1.
        send: asks for one of them.
        on_answer: called after each.
    """
    left = iter(work)
    done: list[tuple[T, Answer]] = []
    idle: list[float] = []

    async def one_client() -> None:
        for item in left:
            done.append((item, await send(item)))
            on_answer()
        idle.append(time.perf_counter())

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return Loop(done, began, min(idle))

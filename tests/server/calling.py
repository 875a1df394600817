"""Requests to an application in this process, and to one behind a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, TypeVar

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from outpace.async_llm import AsyncLLM
from outpace.server.app import create_app
from outpace.server.connections import Connection
from outpace.server.recording import Recorder
from outpace.server.settings import ServerSettings

T = TypeVar("T")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def client_of(
    llm: AsyncLLM,
    settings: ServerSettings | None = None,
    *,
    start: bool = True,
    recorder: Recorder | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of an application in this process; streams arrive as a whole."""
    app = create_app(llm, settings or ServerSettings(), recorder)
    if start:
        await llm.start()
    try:
        async with httpx.AsyncClient(transport=_transport(httpx, app), base_url="http://here", timeout=60) as client:
            yield client
    finally:
        await llm.close()


@asynccontextmanager
async def openai_of(llm: AsyncLLM, settings: ServerSettings | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of an application in this process."""
    app = create_app(llm, settings or ServerSettings())
    # The library that the client is built on, which newer versions have exchanged.
    library = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]]
    async with llm:
        http = openai.DefaultAsyncHttpxClient(transport=_transport(library, app))
        async with openai.AsyncOpenAI(
            base_url="http://here/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            yield client


def _transport(library: Any, app: FastAPI) -> Any:
    return library.ASGITransport(app=app, raise_app_exceptions=False)


@asynccontextmanager
async def listening(llm: AsyncLLM, settings: ServerSettings | None = None) -> AsyncIterator[str]:
    """The address of a real server; the engine is started and closed with it."""
    app = create_app(llm, settings or ServerSettings())
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, ws="none", log_config=None, access_log=False, lifespan="off")
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with llm:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving


def events(text: str) -> list[Any]:
    """The events of a stream; the last is "[DONE]" if it ended well."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    found = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The JSON of an answer that went well."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """The events of a stream that went well, without `[DONE]`."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found.pop() == "[DONE]"
    return found


async def refused(client: httpx.AsyncClient, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error object of an answer with this status."""
    content = json.dumps(body)  # ASCII, so that half a surrogate pair can be sent
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def flat(lists: Iterable[list[T]]) -> list[T]:
    """One list of many."""
    return list(chain.from_iterable(lists))

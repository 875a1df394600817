"""Server-sent events: one line of JSON each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from outpace.errors import OutpaceError
from outpace.server.bodies import as_json
from outpace.server.errors import ApiError, as_api_error, error_body, unexpected

__all__ = ["EventStream"]

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends bodies as they come. An error on the way is the last event: `[DONE]` does not follow.

    Args:
        bodies: in order; raises OutpaceError.
        close: called at the end, also when the client goes away or nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, bodies: AsyncGenerator[BaseModel, None], close: Callable[[], Awaitable[None]]) -> None:
        self.status_code = 200
        self.background = None
        self._bodies = bodies
        self._close = close
        # Proxies are not to hold events back.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        listener = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sender, listener}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                with suppress(OSError):  # how some servers say that the client has gone
                    sender.result()
        finally:
            for task in (sender, listener):
                task.cancel()
            await asyncio.gather(sender, listener, return_exceptions=True)
            await self._bodies.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for body in self._bodies:
                yield b"data: " + as_json(body) + b"\n\n"
        except OutpaceError as error:
            yield _error_event(as_api_error(error))
        except Exception as error:  # whatever it is: the answer has begun, and its status cannot be changed
            yield _error_event(unexpected(error))
        else:
            yield _DONE


def _error_event(error: ApiError) -> bytes:
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue

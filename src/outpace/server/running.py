"""Runs the prompts of one request side by side, and ends them all as soon as the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

from outpace.async_llm import AsyncLLM, Prepared
from outpace.engine.outputs import RequestOutput, StreamChunk

__all__ = ["ClientGone", "Run", "unless_gone"]

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Run:
    """Prepared requests in the engine.

    Args:
        llm: the engine's front.
        prepared: one for each prompt.
        finished: called with every output; None if nobody wants to know.
    """

    def __init__(
        self, llm: AsyncLLM, prepared: Sequence[Prepared], finished: Callable[[RequestOutput], None] | None = None
    ) -> None:
        self._llm = llm
        self._prepared = prepared
        self._finished = finished
        self._arrived: asyncio.Queue[tuple[int, StreamChunk | BaseException]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Queues all of them, or none.

        Raises:
            QueueFull: there is no room.
            OutpaceError: see `AsyncLLM.stream`.
        """
        self._tasks = [
            asyncio.create_task(self._pump(index, prepared)) for index, prepared in enumerate(self._prepared)
        ]
        # A stream is queued before it waits for the first time: when this goes on, it is known whether all were.
        await asyncio.sleep(0)
        if not self._arrived.empty():
            waiting = [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
            for index, item in waiting:
                if isinstance(item, BaseException):
                    await self.close()
                    raise item
                self._arrived.put_nowait((index, item))

    async def chunks(self) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """(number of the prompt, what a step brought to one of its choices), until all are finished.

        Raises:
            OutpaceError: one of them failed.
        """
        left = len(self._prepared)
        while left:
            index, item = await self._arrived.get()
            if isinstance(item, BaseException):
                raise item
            left -= item.output is not None
            yield index, item

    async def outputs(self) -> list[RequestOutput]:
        """The finished requests, in order. Raises what `chunks` raises."""
        found: dict[int, RequestOutput] = {}
        async with aclosing(self.chunks()) as chunks:
            async for index, chunk in chunks:
                if chunk.output is not None:
                    found[index] = chunk.output
        return [found[index] for index in range(len(self._prepared))]

    async def close(self) -> None:
        """Ends what is not finished before the engine's next step."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, index: int, prepared: Prepared) -> None:
        try:
            async with aclosing(self._llm.stream(prepared)) as chunks:
                async for chunk in chunks:
                    if chunk.output is not None and self._finished is not None:
                        self._finished(chunk.output)
                    self._arrived.put_nowait((index, chunk))
        except Exception as error:  # it is raised where the chunks are awaited
            self._arrived.put_nowait((index, error))


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away.

    Args:
        request: whose body was read.
        work: takes long.

    Raises:
        ClientGone: it went.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for waiting in (task, listener):
            waiting.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue

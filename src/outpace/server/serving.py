"""The running server: an engine, the application over it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import uvicorn

from outpace.async_llm import AsyncLLM
from outpace.build import Built, Notify, Progress, build
from outpace.models.files import format_bytes
from outpace.params import SamplingDefaults
from outpace.protocols import Cache
from outpace.server.app import create_app
from outpace.server.arguments import Resolved
from outpace.server.connections import BACKLOG, Connection
from outpace.server.main import QUEUE
from outpace.server.record_header import record_header
from outpace.server.recording import Recorder, check_folder, describe
from outpace.server.served import check_template
from outpace.server.settings import ServerSettings
from outpace.warm_up import warm_up

__all__ = ["build_engine", "ready_line", "serve", "warm_up"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_TO_SAY_SO = 5.0
"""After the time to drain, for clients to be told that their answers were cut off."""


def build_engine(resolved: Resolved, notify: Notify, progress: Progress) -> Built:
    """Loads the model, with the sampling defaults that the settings ask for.

    Raises:
        InvalidParameter: the chat template of the settings is none, or the folder for records cannot be written.
        OutpaceError: the model cannot be found, read, run or held in memory.
    """
    if resolved.server.chat_template is not None:
        check_template(resolved.server.chat_template)
    if resolved.server.record is not None:
        check_folder(Path(resolved.server.record))
    built = build(resolved.engine, resolved.speculative, front="api", notify=notify, progress=progress)
    settings = resolved.server
    defaults = built.defaults if settings.generation_config == "auto" else SamplingDefaults()
    return replace(built, defaults=replace(defaults, **settings.override_generation_config))


def serve(built: Built, settings: ServerSettings, listener: socket.socket) -> int:
    """Serves at a socket that listens until SIGINT or SIGTERM; then running requests may finish.

    Returns:
        the exit code, 0. A second signal ends the process at once, with 1.
    """
    _set_up_logging(settings)
    asyncio.run(_serve(built, settings, listener))
    return 0


async def _serve(built: Built, settings: ServerSettings, listener: socket.socket) -> None:
    llm = AsyncLLM(built, max_waiting=settings.max_waiting)
    recorder = _open_recorder(llm, settings)
    app = create_app(llm, settings, recorder)
    config = uvicorn.Config(
        app,
        http=Connection,
        backlog=BACKLOG,
        ws="none",
        log_config=None,
        access_log=settings.log_requests,
        root_path=settings.root_path,
        timeout_graceful_shutdown=_SECONDS_TO_SAY_SO + settings.drain_seconds,  # type: ignore[arg-type]  # for wait_for
    )
    server = _Server(config, llm, settings.drain_seconds, ready_line(built, listener))
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, server.stop)
    try:
        await llm.start()
        await server.serve(sockets=[listener])
        await llm.close()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if recorder is not None:
            await asyncio.to_thread(recorder.close, _SECONDS_TO_SAY_SO)


def _open_recorder(llm: AsyncLLM, settings: ServerSettings) -> Recorder | None:
    """What the settings ask for; says so.

    Raises:
        UnsupportedModel: no drafter can be trained for this model, so nobody could use what is recorded.
    """
    if settings.record is None:
        return None
    header = record_header(llm)
    folder = Path(settings.record)
    _say(describe(folder, settings.record_max_bytes))
    return Recorder(folder, settings.record_max_bytes, header)


class _Server(uvicorn.Server):
    """A server that ends its engine with itself.

    Args:
        config: of uvicorn.
        llm: the engine.
        drain_seconds: how long running requests may go on.
        ready: what to say once requests are taken.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain_seconds: float, ready: str) -> None:
        super().__init__(config)
        self._llm, self._drain_seconds, self._ready = llm, drain_seconds, ready

    def stop(self) -> None:
        """Takes no more requests and lets the running ones finish; called again, ends the process."""
        if self.should_exit:
            _say("stopped at once")
            os._exit(1)  # a step of the engine cannot be interrupted and may take long
        load = self._llm.load()
        count = load.running + load.waiting
        if count:
            text = "request" if count == 1 else "requests"
            _say(f"stopping: {count} {text} may go on for {self._drain_seconds:g} s; a second signal stops at once")
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves the signals to `stop`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, and says so."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)  # it was cut to what is accepted in one go
        if self.started:
            _say(self._ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the door, and waits for those inside; answers that take too long end with an error."""
        closing = asyncio.ensure_future(super().shutdown(sockets=sockets))
        await self._llm.drain(self._drain_seconds)
        await self._llm.close()
        await closing
        _say("stopped")


def ready_line(built: Built, listener: socket.socket) -> str:
    """One line: address, model, drafter, and what memory each takes."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    memory, tokens = built.engine.memory(), built.config.cache_tokens or 0
    cache = f"{tokens} tokens ({format_bytes(tokens * _bytes_of_a_row(built.engine.cache))})"
    return (
        f"ready at http://{address}: {built.banner()}; memory: model {format_bytes(memory['target'])}, drafter "
        f"{format_bytes(memory['drafter'])}, a cache of at most {cache}"
    )


def _bytes_of_a_row(cache: Cache) -> int:
    """Memory of one token in a cache that nobody uses yet, found out by reserving one."""
    lane = cache.allocate()
    if lane is None or not cache.reserve(lane, 1):
        raise AssertionError("a cache without requests has no place")
    size = cache.bytes_in_use
    cache.release(lane)
    return size


def _say(text: str) -> None:
    print(f"outpace: {text}", file=sys.stderr, flush=True)


def _set_up_logging(settings: ServerSettings) -> None:
    """outpace's own notes, the lines of requests if they were asked for, and warnings of everybody."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("outpace").setLevel(logging.INFO)
    if settings.log_requests:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)

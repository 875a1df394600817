"""Connections over a real socket: silent ones, slow ones, those that break off, and what they leave in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from outpace.server import connections
from tests.asynchronous import run
from tests.server.calling import COMPLETIONS, listening
from tests.server.scripted import scripted

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that looks at its connections five times a second."""
    monkeypatch.setattr(connections, "PATIENCE", 0.2)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _sent_slowly(writer: asyncio.StreamWriter, data: bytes, pause: float) -> None:
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(pause)


SILENT = {
    "nothing at all": b"",
    "half a head": HEAD,
    "a head without its body": HEAD + b"Content-Length: 100\r\n\r\n",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n" + b'{"prompt"',
    "half a chunked body": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half a request behind a whole one": WHOLE + HEAD,
}


@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT)
def test_a_connection_on_which_nothing_more_comes_is_closed(sent: bytes, impatient: None) -> None:
    async def main() -> None:
        async with listening(scripted("ok")) as address, connected(address) as (reader, writer):
            writer.write(sent)
            answered = await asyncio.wait_for(reader.read(), 30)  # until it is closed
            assert answered.count(b"200 OK") == sent.count(BODY)

    run(main())


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"Content-Length: 900\r\n\r\n" + b" " * 800], ids=["head", "body"])
def test_a_request_that_comes_byte_by_byte_is_cut_off(sent: bytes, impatient: None) -> None:
    async def main() -> None:
        async with listening(scripted("ok")) as address, connected(address) as (reader, writer):
            sending = asyncio.create_task(_sent_slowly(writer, sent, 0.05))
            assert await asyncio.wait_for(reader.read(), 30) == b""
            assert not sending.done()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    run(main())


def test_the_connection_that_is_silent_the_longest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections do not keep others out, and none that is being answered is closed for another one."""
    monkeypatch.setattr(connections, "most_connections", lambda: 3)

    async def main() -> None:
        llm = scripted("ok")
        async with listening(llm) as address, AsyncExitStack() as stack:
            llm.model.hold()
            readers = []
            for sent in (WHOLE, b"", HEAD, WHOLE, WHOLE):
                reader, writer = await stack.enter_async_context(connected(address))
                readers.append(reader)
                writer.write(sent)
                await asyncio.sleep(0.1)  # the server has seen it
            refused, _ = await stack.enter_async_context(connected(address))
            for reader in (readers[1], readers[2], refused):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            llm.model.let_go()
            for reader in (readers[0], readers[3], readers[4]):
                assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 200")

    run(main())


def test_there_are_fewer_connections_than_files_that_may_be_open() -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        assert connections.most_connections() > 1000
    else:
        assert 1 <= connections.most_connections() <= max(1, allowed - connections.BACKLOG - 10)


def test_an_answer_that_takes_long_is_waited_for(impatient: None) -> None:
    """And so is a large body that comes at a modest pace."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b" " * 2000
            await asyncio.sleep(0.1)
        yield BODY

    async def main() -> None:
        llm = scripted("ok")
        async with listening(llm) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
            llm.model.hold()
            asked = asyncio.create_task(
                client.post(COMPLETIONS, content=BODY, headers={"Content-Type": "application/json"})
            )
            await asyncio.sleep(1)
            assert not asked.done()
            llm.model.let_go()
            assert (await asked).status_code == 200
            slow = await client.post(COMPLETIONS, content=body(), headers={"Content-Type": "application/json"})
            assert slow.status_code == 200

    run(main())


def test_a_client_that_goes_while_it_sends_leaves_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(scripted("ok")) as address:
            for end in (len(HEAD) + 30, len(WHOLE) - 5, len(WHOLE) - 1):
                async with connected(address) as (_, writer):
                    writer.write(WHOLE[:end])
                    await writer.drain()
                    await asyncio.sleep(0.05)
            async with httpx.AsyncClient() as client:  # the server has seen them all go by then
                assert (await client.get(f"{address}/health")).status_code == 200

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith(("outpace", "uvicorn.error"))
    ] == []


GARBAGE = {
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)) + b"\r\n\r\n",
    "no words": b"\x00\xff" * 40 + b"\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost here\r\n\r\n",
    "a head without end": b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
    "a chunk of no length": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "noise behind a request": WHOLE + b"\x00\x01\x02 what\r\n\r\n",
}


def test_bytes_that_are_no_http_are_answered_and_leave_one_quiet_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(scripted("ok")) as address:
            for sent in GARBAGE.values():
                async with connected(address) as (reader, writer):
                    writer.write(sent)
                    answered = await asyncio.wait_for(reader.read(), 30)
                    assert answered.count(b"HTTP/1.1 400") == 1
                    assert answered.count(b"200 OK") == sent.count(BODY)

    with caplog.at_level(logging.DEBUG, "uvicorn.error"):
        run(main())
    said = [(record.levelno, record.getMessage()) for record in caplog.records if record.levelno > logging.DEBUG]
    assert [item for item in said if item[0] > logging.INFO] == []
    quiet = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert [text for text in quiet if "HTTP" in text] == ["Invalid HTTP request received."] * len(GARBAGE)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_a_wish_for_another_protocol_is_ignored(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Some HTTP clients send one with every first request; uvicorn would advise to install a library each time."""

    async def main() -> None:
        async with listening(scripted("ok")) as address, httpx.AsyncClient(base_url=address) as client:
            answer = await client.get("/health", headers={"Connection": "Upgrade", "Upgrade": protocol})
            assert answer.status_code == 200

    with caplog.at_level(logging.INFO):
        run(main())
    assert not [
        record for record in caplog.records if "pgrade" in record.getMessage() or "ibrary" in record.getMessage()
    ]

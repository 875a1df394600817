"""What clients are told when there is no room, the engine fails, or the server does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outpace.errors import (
    BadInput,
    InvalidParameter,
    InvalidPrompt,
    OutpaceError,
    QueueFull,
    RequestCutOff,
    RequestFailed,
    Unavailable,
)
from outpace.server.app import create_app
from outpace.server.errors import as_api_error
from outpace.server.settings import ServerSettings
from tests.asynchronous import accepted, make_llm, run
from tests.engine.fakes import HistoryModel
from tests.server.calling import CHAT, USER, client_of, events, post, refused
from tests.server.scripted import scripted

TOOL = {"type": "function", "function": {"name": "f"}}


def test_statuses_of_outpace_errors() -> None:
    found = [
        as_api_error(error, ["top_p", "messages"], "messages")
        for error in (
            InvalidParameter("top_p=5 is not possible"),
            InvalidParameter("top_p.more[2].x with 5 is not possible"),
            InvalidParameter("top_pp=5 is not possible"),
            BadInput("the template cannot"),
            InvalidPrompt("the prompt has 5 tokens and the context holds 4, output included"),
            QueueFull("later", 2.1),
            Unavailable("closed"),
            RequestFailed("broken"),
            RequestCutOff("closed"),
            OutpaceError("odd"),
        )
    ]
    assert [(error.status, error.param) for error in found] == [
        (400, "top_p"),
        (400, "top_p.more[2].x"),
        (400, "messages"),
        (400, "messages"),
        (400, "messages"),
        (429, None),
        (503, None),
        (500, None),
        (503, None),
        (500, None),
    ]
    assert [error.code for error in found][4:7] == ["context_length_exceeded", "queue_full", "unavailable"]
    assert found[5].headers == {"Retry-After": "3"}


def test_a_full_queue_is_told_before_a_stream_opens() -> None:
    async def main() -> None:
        llm = scripted("ok", seqs=1, max_waiting=0)
        llm.model.hold()
        async with client_of(llm) as client:
            first = asyncio.ensure_future(client.post(CHAT, json={"messages": USER}))
            await llm.model.entered()
            for streams in (False, True):
                answer = await client.post(CHAT, json={"messages": USER, "stream": streams})
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
            llm.model.let_go()
            assert (await first).status_code == 200

    run(main())


def test_requests_that_fail_inside_the_engine() -> None:
    def broken(history: Any) -> bool:
        return len(history) >= 23

    async def main() -> None:
        llm = scripted("Hello")
        right = llm.model.logits
        llm.model.logits = lambda history: right(history) * float("nan") if broken(history) else right(history)  # type: ignore[method-assign]
        async with client_of(llm) as client:
            error = await refused(client, CHAT, 500, messages=USER)
            assert (error["type"], error["param"]) == ("server_error", None)
            answer = await client.post(CHAT, json={"messages": USER, "stream": True})
            assert answer.status_code == 200
            *chunks, last = events(answer.text)
            assert last["error"]["type"] == "server_error"
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks).startswith("He")
            assert (await post(client, CHAT, messages=USER, max_tokens=1))["usage"]["completion_tokens"] == 1

    run(main())


def test_faults_of_the_server_are_errors_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a private detail")

    async def main() -> None:
        async with client_of(scripted("ok")) as client:
            with monkeypatch.context() as patch:
                patch.setattr("outpace.server.chat.usage_of", fail)
                error = await refused(client, CHAT, 500, messages=USER)
                assert error["type"] == "server_error"
                assert "private" not in error["message"]
            with monkeypatch.context() as patch:
                patch.setattr("outpace.server.chat_stream.usage_of", fail)
                body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
                *_, last = events((await client.post(CHAT, json=body)).text)
                assert "private" not in last["error"]["message"]
            await post(client, CHAT, messages=USER)

    run(main())
    assert "a private detail" in caplog.text


def test_health_follows_the_engine() -> None:
    async def main() -> None:
        llm = scripted("ok")
        async with client_of(llm, start=False) as client:
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            await llm.start()
            assert (await client.get("/health")).status_code == 200
            await llm.drain(0)
            assert (await client.get("/health")).status_code == 503
            assert (await refused(client, CHAT, 503, messages=USER))["code"] == "unavailable"

    run(main())


def test_answers_that_are_cut_off_at_the_end_may_be_asked_for_again() -> None:
    async def main() -> None:
        llm = scripted("ok")
        async with client_of(llm) as client:
            llm.model.hold()
            whole = asyncio.ensure_future(client.post(CHAT, json={"messages": USER}))
            await llm.model.entered()
            streamed = asyncio.ensure_future(client.post(CHAT, json={"messages": USER, "stream": True}))
            await accepted(llm, 2)
            await llm.drain(0.01)
            closing = asyncio.ensure_future(llm.close())
            await asyncio.sleep(0)  # it is asked to stop while the first step goes on
            llm.model.let_go()
            await closing
            answer, stream = await whole, await streamed
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "unavailable")
            assert error["message"].startswith("the server is stopping") and error["message"].endswith("ask again")
            *_, last = events(stream.text)
            assert last["error"] == error

    run(main())


def test_a_model_without_chat_template() -> None:
    async def main() -> None:
        async with client_of(scripted(template=None)) as client:
            assert "no chat template" in (await refused(client, CHAT, messages=USER))["message"]
            error = await refused(client, CHAT, messages=USER, tools=[TOOL])
            assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)
        template = "{{ raise_exception('roles must alternate') }}"
        async with client_of(scripted(template=template)) as client:
            for streams in (False, True):
                error = await refused(client, CHAT, messages=USER, stream=streams)
                assert ("roles must alternate" in error["message"], error["param"]) == (True, "messages")

    run(main())


@pytest.mark.parametrize("settings", [{"tool_call_parser": "x"}, {"reasoning_parser": "x"}])
def test_parsers_that_are_not_known_are_refused_at_once(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidParameter, match="is not known"):
        create_app(make_llm(HistoryModel()), ServerSettings(**settings))  # type: ignore[arg-type]

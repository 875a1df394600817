"""OpenAI's own client, real sockets, clients that go away, and a real model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outpace.async_llm import AsyncLLM
from outpace.build import build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.params import SamplingParams, SpeculationParams
from outpace.server.app import create_app
from outpace.server.settings import ServerSettings
from tests.asynchronous import run, settled
from tests.server.calling import CHAT, COMPLETIONS, USER, client_of, listening, openai_of, post, stream
from tests.server.scripted import HERMES, scripted
from tests.server.test_api_chat import CALL, TOOLS
from tests.server.tiny_folder import save_tiny_model


def test_the_asynchronous_client() -> None:
    async def main() -> None:
        async with openai_of(scripted("Hello, world.")) as client:
            assert [model.id async for model in client.models.list()] == ["org/scripted"]
            found = await client.chat.completions.create(model="org/scripted", messages=USER)  # type: ignore[call-overload]
            assert found.choices[0].message.content == "Hello, world."
            assert found.usage.total_tokens == found.usage.prompt_tokens + 13
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="org/scripted",
                    messages=USER,  # type: ignore[arg-type]
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"top_k": 1, "speculative": {"enabled": False}},
                )
            ]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world."
            assert chunks[-1].usage == found.usage
            text = await client.completions.create(model="org/scripted", prompt=["a", "b"], max_tokens=5)
            assert [choice.text for choice in text.choices] == ["Hello,"] * 2

    run(main())


def test_the_client_understands_errors() -> None:
    async def main() -> None:
        async with openai_of(scripted(), ServerSettings(api_keys=("none",))) as client:
            with pytest.raises(openai.BadRequestError, match="temperature") as caught:
                await client.chat.completions.create(model="org/scripted", messages=USER, temperature=-1)  # type: ignore[call-overload]
            assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.NotFoundError, match="text only"):
                await client.embeddings.create(model="org/scripted", input="a")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()

    run(main())


def test_an_error_inside_a_stream_reaches_the_client() -> None:
    async def main() -> None:
        llm = scripted("Hello")
        async with openai_of(llm) as client:
            right = llm.model.logits
            llm.model.logits = lambda history: right(history) * (float("nan") if len(history) > 22 else 1.0)  # type: ignore[method-assign]
            found: list[Any] = []
            with pytest.raises(openai.APIError, match="logits"):
                async for chunk in await client.chat.completions.create(
                    model="org/scripted", messages=USER, stream=True
                ):  # type: ignore[call-overload]
                    found.append(chunk)
            assert found

    run(main())


def test_the_blocking_client_over_a_socket() -> None:
    def talk(address: str) -> list[str]:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
            whole = client.chat.completions.create(model="org/scripted", messages=USER, tools=TOOLS)  # type: ignore[call-overload]
            assert whole.choices[0].finish_reason == "tool_calls"
            assert whole.choices[0].message.tool_calls[0].function.name == "weather"
            with client.chat.completions.stream(model="org/scripted", messages=USER, tools=TOOLS) as events:  # type: ignore[arg-type]
                final = events.get_final_completion()
            assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}
            with client.completions.create(model="org/scripted", prompt="a", max_tokens=200, stream=True) as parts:
                return [part.choices[0].text for part in parts]

    async def main() -> None:
        async with listening(scripted(CALL, HERMES), ServerSettings(api_keys=("key",))) as address:
            texts = await asyncio.to_thread(talk, address)
            assert "".join(texts) == CALL
            assert len(texts) > 1

    run(main())


def test_large_bodies_over_a_socket_get_their_answer() -> None:
    async def main() -> None:
        async with (
            listening(scripted(), ServerSettings(max_body_bytes=2_000_000)) as address,
            httpx.AsyncClient(base_url=address, timeout=60) as client,
        ):
            answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 5_000_000}]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 300_000}]})
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    run(main())


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_place(streams: bool) -> None:
    async def main() -> None:
        llm = scripted("a" * 900)
        async with listening(llm) as address:
            llm.model.hold()
            body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 900, "stream": streams}
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                asking = asyncio.ensure_future(_read(client, body))
                await llm.model.entered()
                llm.model.go(3)
                for _ in range(3):
                    await llm.model.entered()
                assert llm.load().running == 4
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            while llm.load().running or llm.load().waiting:  # it is noticed while the engine goes on step by step
                llm.model.go()
                await asyncio.sleep(0.01)
            assert llm.load().steps < 100
            llm.model.let_go()

    run(main())


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


def test_a_stream_begins_before_its_first_token() -> None:
    async def main() -> None:
        llm = scripted("abc")
        llm.model.hold()
        async with listening(llm) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
            async with client.stream("POST", CHAT, json={"messages": USER, "stream": True}) as answer:
                assert answer.status_code == 200
                await llm.model.entered()
                assert llm.load().steps == 0
                llm.model.let_go()
                text = "".join([part async for part in answer.aiter_text()])
            assert text.endswith("data: [DONE]\n\n")

    run(main())


def test_disconnecting_by_the_protocol_alone() -> None:
    """What a server tells an application, message by message, at every possible moment."""

    async def main() -> None:
        llm = scripted("a" * 400)
        app = create_app(llm, ServerSettings())
        async with llm:
            for streams in (True, False):
                for sends in range(6):
                    await _visit(app, {"prompt": "x", "max_tokens": 400, "stream": streams}, sends)
                    assert llm.failure is None
            await settled(llm)

    async def _visit(app: Any, body: dict[str, Any], sends: int) -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await (asyncio.sleep(0.005) if sends == 0 else gone.wait())
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) >= sends:
                gone.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }
        await asyncio.wait_for(app(scope, receive, send), 60)

    run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_real_model_answers_with_the_same_words_whichever_way(folder: Path) -> None:
    """Batches, streams and speculation over HTTP give the text of the engine's own front, plain, for every seed."""
    config = EngineConfig(
        model=str(folder), quantization="none", kernels="torch", threads=1, cache_tokens=4000, max_num_seqs=4
    )
    llm = AsyncLLM(build(config, [SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)]))
    prompts = ["abc abc abc", "hello hello", "x"]
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "n": 2}

    async def plain(prompt: str) -> list[str]:
        prepared = await llm.prepare(prompt, SamplingParams(**options), SpeculationParams(enabled=False))  # type: ignore[arg-type]
        return [choice.text for choice in (await llm.complete(prepared)).outputs]

    async def main() -> None:
        async with client_of(llm) as client:
            expected = [text for prompt in prompts for text in await plain(prompt)]
            whole = await post(client, COMPLETIONS, prompt=prompts, **options)
            assert [choice["text"] for choice in whole["choices"]] == expected
            chunks = await stream(client, COMPLETIONS, prompt=prompts, **options)
            parts = [choice for chunk in chunks for choice in chunk["choices"]]
            joined = ["".join(part["text"] for part in parts if part["index"] == index) for index in range(6)]
            assert joined == expected
            chat = {"messages": USER, "max_completion_tokens": 40, "temperature": 0.8, "seed": 3}
            drafted = await post(client, CHAT, **chat)
            undrafted = await post(client, CHAT, **chat, speculative={"enabled": False})
            assert drafted["choices"] == undrafted["choices"]
            assert drafted["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
            assert undrafted["metrics"]["speculative_decoding"] is None

    run(main())

"""Keys, sizes and other origins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from outpace.models.tokenizer import Tokenizer
from outpace.server.app import create_app
from outpace.server.settings import ServerSettings
from tests.asynchronous import run
from tests.server.calling import CHAT, COMPLETIONS, USER, client_of, post, refused
from tests.server.scripted import CAPACITY, scripted

JSON = {"Content-Type": "application/json"}


def test_a_body_that_is_too_large_is_refused_however_it_comes() -> None:
    async def main() -> None:
        async with client_of(scripted("ok"), ServerSettings(max_body_bytes=500)) as client:
            short = json.dumps({"messages": USER}).encode().ljust(500)
            assert (await client.post(CHAT, content=short, headers=JSON)).status_code == 200

            async def pieces(count: int) -> AsyncIterator[bytes]:
                yield short
                for _ in range(count):
                    yield b" "
                sent.append(count)

            for content in (short + b" ", pieces(1), pieces(5000)):
                sent: list[int] = []
                answer = await client.post(CHAT, content=content, headers=JSON)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert not sent  # the last one was cut off

    run(main())


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding 16 MB takes many seconds, in one of the two threads that all clients share."""
    encoded: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    async def main() -> None:
        async with client_of(scripted("ok", drafts=False)) as client:
            monkeypatch.setattr(Tokenizer, "encode", watched)
            longest = max(map(len, scripted().tokenizer.vocab))
            most = CAPACITY * longest
            for path, param, body in (
                (COMPLETIONS, "prompt", {"prompt": "a" * (most + 1)}),
                (COMPLETIONS, "prompt[1]", {"prompt": ["a", "a" * (most + 1)]}),
                (CHAT, "messages[1].content", {"messages": [*USER, {"role": "user", "content": "a" * (most + 1)}]}),
            ):
                encoded.clear()
                error = await refused(client, path, **body)
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
                assert f"at most {most}" in error["message"]
                assert max(encoded, default=0) <= most
            # as long as is possible: that it does not fit is found by encoding it
            error = await refused(client, COMPLETIONS, prompt="a" * most)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert encoded[-1] == most
            await post(client, COMPLETIONS, prompt="a" * (most + 1), truncate_prompt_tokens=5, max_tokens=1)

    run(main())


def test_keys() -> None:
    async def main() -> None:
        async with client_of(scripted("ok"), ServerSettings(api_keys=("one", "twö"))) as client:
            guarded = (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/v1/nothing", "/v1/models/x")
            for given in (
                None,
                "Bearer",
                "Bearer ",
                "Bearer One",
                "Basic one",
                "one",
                "Bearer one two",
                b"Bearer \xff",
            ):
                headers = {} if given is None else {"Authorization": given}
                for path in guarded:
                    answer = await client.post(path, content="{", headers=headers)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
                    assert answer.headers["www-authenticate"] == "Bearer"
            for key in ("Bearer one", "bearer  one", "Bearer twö".encode()):
                answer = await client.post(CHAT, json={"messages": USER}, headers={"Authorization": key})
                assert answer.status_code == 200
            for path in ("/health", "/version", "/metrics", "/"):
                assert (await client.get(path)).status_code == 200

    run(main())


def test_keys_behind_a_proxy_prefix() -> None:
    async def main() -> None:
        app = create_app(scripted(), ServerSettings(api_keys=("one",)))
        transport = httpx.ASGITransport(app=app, root_path="/proxy")
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for path in ("/v1/models", "/proxy/v1/models"):
                assert (await client.get(path)).status_code == 401

    run(main())


def test_other_origins() -> None:
    async def main(settings: ServerSettings, expected: str | None) -> None:
        async with client_of(scripted("ok"), settings) as client:
            asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
            answer = await client.options(CHAT, headers=asked)
            assert answer.headers.get("access-control-allow-origin") == expected
            refusal = await client.post(CHAT, json={}, headers={"Origin": "https://a.example"})
            assert refusal.headers.get("access-control-allow-origin") == expected

    run(main(ServerSettings(), None))
    run(main(ServerSettings(allowed_origins=("https://a.example",), api_keys=("k",)), "https://a.example"))
    run(main(ServerSettings(allowed_origins=("https://b.example",)), None))
    run(main(ServerSettings(allowed_origins=("*",)), "*"))


@pytest.mark.parametrize("keys", [(), ("one", "other")])
def test_every_key_is_a_tenant_of_its_own(keys: tuple[str, ...]) -> None:
    """What one was answered drafts for nobody else."""

    async def main() -> None:
        llm = scripted()
        async with client_of(llm, ServerSettings(api_keys=keys)) as client:
            seen = []
            start = llm.built.engine.drafting.drafters["ngram"].start
            llm.built.engine.drafting.drafters["ngram"].start = lambda *args, tenant: (
                seen.append(tenant) or start(*args)
            )
            for key in ("one", "other", "one"):
                client.headers["Authorization"] = f"Bearer {key}"
                await post(client, CHAT, messages=USER)
                await post(client, COMPLETIONS, prompt="Hi", max_tokens=2)
            assert seen == ([""] * 6 if not keys else ["one", "one", "other", "other", "one", "one"])

    run(main())

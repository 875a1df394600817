"""What was computed for an earlier turn of a conversation is used for the next, and `usage` says how much."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.asynchronous import run
from tests.server.calling import CHAT, COMPLETIONS, USER, client_of, listening, post, stream
from tests.server.scripted import Scripted, scripted

ANSWER = "Hello hello hello."
COUNTED = {"stream_options": {"include_usage": True}}


def cached(found: Any) -> int:
    count: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def common(llm: Scripted, first: str, second: str) -> int:
    """How many tokens two texts have in common, from their beginning."""
    pairs = zip(llm.tokenizer.encode(first), llm.tokenizer.encode(second), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(llm.tokenizer.encode(first)))


@pytest.mark.parametrize("drafts", [False, True])
def test_the_next_turn_reuses_the_turns_before(drafts: bool) -> None:
    async def main() -> None:
        llm = scripted(ANSWER, reuse=True, drafts=drafts)
        async with client_of(llm) as client:
            first = await post(client, CHAT, messages=USER)
            assert cached(first) == 0
            told = [*USER, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Again"}]
            *_, last = await stream(client, CHAT, messages=told, **COUNTED)
            # all of the first turn, what the template writes behind an answer being the model's or not
            before = f"user: Hi\nassistant: {ANSWER}"
            rows = common(llm, before, llm.tokenizer.render_chat(told))
            assert cached(last) == rows == len(llm.tokenizer.encode(before))
            assert last["usage"]["prompt_tokens"] == len(llm.tokenizer.encode(llm.tokenizer.render_chat(told)))

    run(main())


def test_a_prompt_that_is_wholly_there_computes_one_row() -> None:
    async def main() -> None:
        async with client_of(scripted(ANSWER, reuse=True)) as client:
            first = await post(client, CHAT, messages=USER)
            second = await post(client, CHAT, messages=USER)
            assert (cached(first), cached(second)) == (0, first["usage"]["prompt_tokens"] - 1)
            assert second["choices"] == first["choices"]
            both = {"prompt": ["abcdefgh", "xyzuvw"], "max_tokens": 3}
            assert cached(await post(client, COMPLETIONS, **both)) == 0
            assert cached(await post(client, COMPLETIONS, **both)) == 7 + 5

    run(main())


def test_rows_of_a_client_who_left_are_reused() -> None:
    async def main() -> None:
        llm = scripted("a" * 600, reuse=True)
        async with listening(llm) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
            body = {"messages": USER, "stream": True, "max_tokens": 500}
            async with client.stream("POST", CHAT, json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
            while llm.load().running:
                await asyncio.sleep(0.01)
            found = await post(client, CHAT, messages=USER, max_tokens=20)
            assert cached(found) == found["usage"]["prompt_tokens"] - 1
            assert found["choices"][0]["message"]["content"] == "a" * 20

    run(main())

"""/v1/completions, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types import Completion

from outpace.server.settings import ServerSettings
from tests.asynchronous import accepted, run
from tests.server.calling import COMPLETIONS, USER, client_of, flat, post, refused, stream
from tests.server.scripted import CAPACITY, scripted


def answer_of(prompt: str) -> str:
    return {"a": "bcd", "x": "yz"}.get(prompt, "?")


async def ask(client: httpx.AsyncClient, *, first_is_null: bool = False, **body: Any) -> Any:
    found = await post(client, COMPLETIONS, **body)
    if not first_is_null:  # OpenAI's server sends it, and OpenAI's type does not have it
        Completion.model_validate(found)
    return found


async def chunks_of(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    return await stream(client, COMPLETIONS, **body)


def texts(found: Any) -> list[str]:
    return [choice["text"] for choice in found["choices"]]


def test_prompts_of_every_form() -> None:
    async def main() -> None:
        llm = scripted(answer_of)
        async with client_of(llm) as client:
            a, x = llm.tokenizer.encode("a"), llm.tokenizer.encode("x")
            for prompt, expected in (
                ("a", ["bcd"]),
                (a, ["bcd"]),
                (["a", "x"], ["bcd", "yz"]),
                ([x, a], ["yz", "bcd"]),
                (["a", x], ["bcd", "yz"]),
                ([a], ["bcd"]),
            ):
                found = await ask(client, prompt=prompt)
                assert texts(found) == expected
                assert [choice["index"] for choice in found["choices"]] == list(range(len(expected)))
                assert all(choice["finish_reason"] == "stop" for choice in found["choices"])
            assert found["usage"]["completion_tokens"] == 4
            both = await ask(client, prompt=["a", "x"], n=2, request_id="me")
            assert both["id"] == "cmpl-me"
            assert texts(both) == ["bcd", "bcd", "yz", "yz"]
            assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
            assert (both["usage"]["prompt_tokens"], both["usage"]["completion_tokens"]) == (2, 14)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[0]"),
        ([1, True], "prompt[0]"),
        ([[1], [True]], "prompt[1]"),
        ([[1], [2, 10**20]], "prompt[1]"),
        ([-1], "prompt"),
        ([10**20], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ("\ud800", "prompt"),
    ],
)
def test_prompts_that_are_not_possible(prompt: Any, param: str) -> None:
    async def main() -> None:
        async with client_of(scripted()) as client:
            error = await refused(client, COMPLETIONS, prompt=prompt)
            assert (error["param"], error["type"]) == (param, "invalid_request_error")

    run(main())


def test_a_prompt_that_is_too_long() -> None:
    async def main() -> None:
        async with client_of(scripted(lambda prompt: "ok")) as client:
            error = await refused(client, COMPLETIONS, prompt="a" * CAPACITY)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            error = await refused(
                client, "/v1/chat/completions", messages=[{"role": "user", "content": "a" * CAPACITY}]
            )
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            found = await ask(client, prompt="a" * CAPACITY, truncate_prompt_tokens=5)
            assert (texts(found), found["usage"]["prompt_tokens"]) == (["ok"], 5)

    run(main())


def test_sixteen_tokens_unless_asked() -> None:
    async def main() -> None:
        async with client_of(scripted("0123456789" * 10)) as client:
            assert texts(await ask(client, prompt="a")) == ["0123456789012345"]
            assert texts(await ask(client, prompt="a", max_tokens=None)) == ["0123456789012345"]
            assert len(texts(await ask(client, prompt="a", min_tokens=30))[0]) == 30
            assert texts(await ask(client, prompt="a", max_tokens=3)) == ["012"]

    run(main())


def test_a_stream() -> None:
    async def main() -> None:
        async with client_of(scripted(answer_of)) as client:
            body = {"prompt": ["a", "x"], "n": 2, "stream_options": {"include_usage": True}, "echo": True}
            *found, usage = await chunks_of(client, **body, outpace={"pieces": True})
            joined = [
                "".join(c["text"] for chunk in found for c in chunk["choices"] if c["index"] == i) for i in range(4)
            ]
            assert joined == ["abcd", "abcd", "xyz", "xyz"]
            assert all(len(chunk["choices"]) == 1 for chunk in found)
            ends = [c["finish_reason"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
            assert ends == ["stop"] * 4
            assert all(c["text"] for chunk in found for c in chunk["choices"] if not c["finish_reason"])
            assert usage["choices"] == []
            assert usage["usage"] == (await ask(client, **{**body, "stream_options": None}))["usage"]
            pieces = [text for chunk in found for text, _ in chunk["outpace"]["pieces"]]
            assert sorted("".join(pieces)) == sorted("bcdbcdyzyz")

    run(main())


def test_log_probabilities_of_prompt_and_answer() -> None:
    async def main() -> None:
        llm = scripted("cd")
        async with client_of(llm) as client:
            found = await ask(client, prompt="ab", logprobs=2, echo=True, first_is_null=True)
            logprobs = found["choices"][0]["logprobs"]
            assert texts(found) == ["abcd"]
            assert logprobs["tokens"] == ["a", "b", "c", "d", "</s>"]
            assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
            columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
            rows = list(zip(*columns, strict=True))
            for token, own, top in rows[1:]:
                assert top[token] == own and len(top) in (2, 3)
            alone = (await ask(client, prompt="ab", logprobs=0))["choices"][0]["logprobs"]
            assert (alone["tokens"], alone["text_offset"]) == (["c", "d", "</s>"], [0, 1, 2])
            assert [len(top) for top in alone["top_logprobs"]] == [1, 1, 1]
            chunks = await chunks_of(client, prompt="ab", logprobs=0)
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            for key in alone:
                assert flat(part[key] for part in parts) == alone[key]
            ids = (await ask(client, prompt="ab", logprobs=0, return_tokens_as_token_ids=True))["choices"][0]
            assert ids["logprobs"]["tokens"] == [f"token_id:{i}" for i in [*llm.tokenizer.encode("cd"), 1]]
            prompt = (await ask(client, prompt="ab", prompt_logprobs=1))["choices"][0]
            assert prompt["prompt_logprobs"][0] is None and len(prompt["prompt_logprobs"]) == 2
            assert prompt["logprobs"] is None

    run(main())


def test_a_text_can_be_scored_alone() -> None:
    async def main() -> None:
        async with client_of(scripted("cd")) as client:
            found = await ask(client, prompt=["ab", "q"], echo=True, max_tokens=0, logprobs=0, first_is_null=True)
            assert texts(found) == ["ab", "q"]
            assert [choice["logprobs"]["tokens"] for choice in found["choices"]] == [["a", "b"], ["q"]]
            assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
            assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 0)
            chunks = await chunks_of(client, prompt="ab", echo=True, max_tokens=0)
            assert [(c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]] == [("ab", "length")]
            assert (await refused(client, COMPLETIONS, prompt="ab", max_tokens=0))["param"] == "max_tokens"

    run(main())


def test_token_ids() -> None:
    async def main() -> None:
        llm = scripted("cd")
        async with client_of(llm) as client:
            choice = (await ask(client, prompt="ab", return_token_ids=True))["choices"][0]
            assert choice["prompt_token_ids"] == llm.tokenizer.encode("ab")
            assert choice["token_ids"] == [*llm.tokenizer.encode("cd"), 1]
            chunks = await chunks_of(client, prompt="ab", return_token_ids=True)
            assert flat(chunk["choices"][0]["token_ids"] for chunk in chunks) == choice["token_ids"]
            assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]

    run(main())


def test_special_tokens_in_front() -> None:
    async def main() -> None:
        async with client_of(scripted("c", bos=True)) as client:
            for text, added, expected in (("ab", True, 3), ("ab", False, 2), ("<s>ab", False, 3), ("<s>ab", True, 3)):
                body = {"prompt": text, "add_special_tokens": added}
                assert (await ask(client, **body))["usage"]["prompt_tokens"] == expected
                assert (await post(client, "/tokenize", **body))["count"] == expected

    run(main())


def test_tokenize_and_detokenize() -> None:
    async def main() -> None:
        llm = scripted()
        async with client_of(llm) as client:
            found = await post(client, "/tokenize", model="org/scripted", prompt="hello", return_token_strs=True)
            ids = llm.tokenizer.encode("hello")
            assert found == {
                "count": len(ids),
                "max_model_len": CAPACITY,
                "tokens": ids,
                "token_strs": [llm.tokenizer.token(i) for i in ids],
            }
            assert (await post(client, "/detokenize", tokens=[*ids, 1])) == {"prompt": "hello</s>"}
            chat = await post(client, "/tokenize", messages=USER)
            assert llm.tokenizer.decode(chat["tokens"]) == "user: Hi\nassistant: "
            bare = await post(client, "/tokenize", messages=USER, add_generation_prompt=False)
            assert llm.tokenizer.decode(bare["tokens"]) == "user: Hi\n"
            tools = [{"type": "function", "function": {"name": "f"}}]
            shown = await post(client, "/tokenize", messages=USER, tools=tools)
            assert llm.tokenizer.decode(shown["tokens"]).startswith("tools: 1")
            for path, body, param in (
                ("/tokenize", {}, "prompt"),
                ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
                ("/tokenize", {"messages": []}, "messages"),
                ("/tokenize", {"messages": USER, "tools": [1]}, "tools[0]"),
                ("/tokenize", {"prompt": "\ud800"}, "prompt"),
                ("/tokenize", {"promt": "a"}, "promt"),
                ("/detokenize", {}, "tokens"),
                ("/detokenize", {"tokens": [-1]}, "tokens"),
                ("/detokenize", {"tokens": [10**30]}, "tokens"),
                ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
            ):
                assert (await refused(client, path, **body))["param"] == param

    run(main())


def test_a_batch_is_queued_as_a_whole_or_not_at_all() -> None:
    async def main() -> None:
        llm = scripted("c", seqs=2, max_waiting=1)
        llm.model.hold()
        async with client_of(llm, ServerSettings(max_waiting=1)) as client:
            error = await refused(client, COMPLETIONS, prompt=["a", "b"], n=2)
            assert error["param"] == "prompt"
            llm.model.hold()
            first = await llm.prepare("z")
            stream_ = llm.stream(first)
            waiting = asyncio.ensure_future(anext(stream_))
            await llm.model.entered()
            error = await refused(client, COMPLETIONS, 429, prompt=["a", "b", "c"])
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            llm.model.let_go()
            await waiting
            await stream_.aclose()
            await accepted(llm, 0)  # the engine's thread hears of it later
            assert texts(await ask(client, prompt=["a", "b", "c"])) == ["c"] * 3

    run(main())

"""Errors, keys, limits and what is never said: every error is an object that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outpace.server.settings import ServerSettings
from tests.asynchronous import run
from tests.server.calling import CHAT, COMPLETIONS, USER, client_of, post, refused
from tests.server.scripted import HERMES, scripted

JSON = {"Content-Type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}
NOT_POSSIBLE = {
    "type": "function",
    "function": {"name": "g", "parameters": {"properties": {"a": {"$ref": "#/nowhere"}}}},
}
"""A tool whose arguments no grammar can prescribe."""
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

POSSIBLE: list[dict[str, Any]] = [
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "x"},
    {"temperature": None, "tools": None, "stop": None, "logprobs": None, "messages_extra": None},
    {"best_of": 1, "use_beam_search": False, "priority": 0, "modalities": ["text"], "functions": []},
    {"stream_options": None, "tool_choice": None, "response_format": {"type": "text"}},
    {"top_k": -1, "min_p": 0, "seed": 5, "logit_bias": {"5": -100}, "ignore_eos": True, "max_tokens": 2},
    {"max_tokens": 2, "max_completion_tokens": 2},
]

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": 5, "content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "temperature": -1}, "temperature"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"tools": [NOT_POSSIBLE], "tool_choice": "required"}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": 5}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"speculative": True}, "speculative"),
    ({"speculative": {"num_speculative_tokens": 65}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"enabled": "no"}}, "speculative.enabled"),
    ({"speculative": {"tokens": 5}}, "speculative.tokens"),
    ({"speculative": {"method": "eagle"}}, "speculative.method"),
    ({"outpace": {"pieces": 1}}, "outpace.pieces"),
    ({"outpace": {"piece": True}}, "outpace.piece"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"best_of": 2}, "best_of"),
    ({"logits_processors": ["f"]}, "logits_processors"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"cache_salt": "x"}, "cache_salt"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template": "x"}, "chat_template"),
    ({"prompt": "x"}, "prompt"),
    ({"tempratur": 1}, "tempratur"),
    ({"\ud800": 1}, "\ud800"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize("body", POSSIBLE, ids=str)
def test_harmless_fields_and_values_pass(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with client_of(scripted("ok")) as client:
            await post(client, CHAT, **{"messages": USER, **body})

    run(main())


def test_what_is_not_possible_is_refused_by_name() -> None:
    async def main() -> None:
        async with client_of(scripted("ok", HERMES)) as client:
            for body, param in IMPOSSIBLE:
                error = await refused(client, CHAT, **{"messages": USER, **body})
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), (body, error)
                assert error["message"]

    run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True}, "echo"),
        ({"messages": USER}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"tools": []}, "tools"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_completions_refuse_by_name(body: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with client_of(scripted()) as client:
            assert (await refused(client, COMPLETIONS, prompt="a", **body))["param"] == param

    run(main())


def test_hints() -> None:
    async def main() -> None:
        async with client_of(scripted()) as client:
            for path, body, hint in (
                (CHAT, {"messages": USER, "tempratur": 1}, "did you mean 'temperature'?"),
                (CHAT, {"messages": USER, "prompt": "a"}, "it belongs to /v1/completions"),
                (COMPLETIONS, {"prompt": "a", "messages": USER}, "it belongs to /v1/chat/completions"),
                (CHAT, {"messages": USER, "guided_regex": "a"}, "structured_outputs="),
                (
                    CHAT,
                    {"messages": USER, "speculative": {"enable": True}},
                    "there is no 'enable'; did you mean enabled?",
                ),
                (CHAT, {"messages": USER, "speculative": 3}, "it must be an object"),
                (CHAT, {"messages": 3}, "it must be an array"),
                (CHAT, {"messages": USER, "stream": "yes"}, "it must be true or false"),
            ):
                assert hint in (await refused(client, path, **body))["message"]

    run(main())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"messages": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    async def main() -> None:
        async with client_of(scripted()) as client:
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                answer = await client.post(path, content=body, headers=JSON)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["code"] == "invalid_json"

    run(main())


def test_content_types() -> None:
    async def main() -> None:
        async with client_of(scripted("ok")) as client:
            content = json.dumps({"messages": USER})
            for kind, status in (
                ("application/json; charset=utf-8", 200),
                ("application/problem+json", 200),
                ("text/plain", 415),
                ("application/x-www-form-urlencoded", 415),
                ("", 415),
            ):
                answer = await client.post(CHAT, content=content, headers={"Content-Type": kind})
                assert answer.status_code == status
            assert answer.json()["error"]["type"] == "invalid_request_error"

    run(main())


def test_models_and_paths() -> None:
    async def main() -> None:
        settings = ServerSettings(served_model_names=("first", "org/second"))
        async with client_of(scripted("ok"), settings) as client:
            for name in ("first", "org/second", None):
                assert (await post(client, CHAT, messages=USER, model=name))["model"] == "first"
            error = await refused(client, CHAT, 404, messages=USER, model="third")
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            for path in (COMPLETIONS, "/tokenize", "/detokenize"):
                body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
                assert (await refused(client, path, 404, model="\ud800", **body))["code"] == "model_not_found"
            listed = (await client.get("/v1/models")).json()
            assert [item["id"] for item in listed["data"]] == ["first", "org/second"]
            assert (await client.get("/v1/models/org/second")).json()["root"] == "org/scripted"
            assert (await client.get("/v1/models/other")).status_code == 404
            for path, hint in (
                ("/v1/responses", "/v1/chat/completions"),
                ("/v1/embeddings", "text only"),
                ("/chat/completions", "/v1"),
                ("/nowhere", "/v1/models"),
            ):
                assert hint in (await refused(client, path, 404))["message"]
            answer = await client.get(CHAT)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert answer.json()["error"]["code"] == "method_not_allowed"
            assert (await client.post("/health")).json()["error"]["message"].endswith("use GET, HEAD")

    run(main())


def test_what_can_be_fetched_can_be_asked_for_without_its_body() -> None:
    """As those do that watch over servers."""

    async def main() -> None:
        async with client_of(scripted()) as client:
            for path in ("/", "/health", "/version", "/metrics", "/v1/models", "/v1/models/org/scripted"):
                there = await client.get(path)
                answer = await client.head(path)
                assert (answer.status_code, answer.headers["content-type"]) == (200, there.headers["content-type"])

    run(main())

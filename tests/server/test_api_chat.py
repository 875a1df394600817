"""/v1/chat/completions: answers and streams, reasoning, tools, formats."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from outpace.server.settings import ServerSettings
from tests.asynchronous import run
from tests.server.calling import CHAT, USER, client_of, flat, post, refused, stream
from tests.server.scripted import HERMES, THINKING, scripted

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
COUNTED = {"stream_options": {"include_usage": True}}


async def ask(client: httpx.AsyncClient, **body: Any) -> Any:
    found = await post(client, CHAT, messages=body.pop("messages", USER), **body)
    ChatCompletion.model_validate(found)
    return found


async def chunks_of(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    found = await stream(client, CHAT, messages=body.pop("messages", USER), **body)
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    return found


def joined(chunks: list[Any], key: str = "content", index: int = 0) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get(key) or "" for delta in deltas)


def test_an_answer() -> None:
    async def main() -> None:
        async with client_of(scripted("Hello, world.")) as client:
            found = await ask(client, model="org/scripted", request_id="mine")
            assert found["id"] == "chatcmpl-mine"
            (choice,) = found["choices"]
            assert choice["message"] == {"role": "assistant", "content": "Hello, world.", "refusal": None}
            assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
            prompt = len("user: Hi\nassistant: ")  # "ll" is one token, every other byte is another
            assert found["usage"] == {
                "prompt_tokens": prompt,
                "completion_tokens": 13,  # and one for EOS
                "total_tokens": prompt + 13,
                "prompt_tokens_details": {"cached_tokens": 0},
            }

    run(main())


def test_a_stream_has_role_then_steps_then_reason_then_usage() -> None:
    async def main() -> None:
        async with client_of(scripted("abcabcabcabcabcabcabc")) as client:
            found = await chunks_of(client, **COUNTED)
            assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            *middle, reason, usage = found[1:]
            assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
            assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in found[:-2])
            assert joined(found) == "abcabcabcabcabcabcabc"
            assert (reason["choices"][0]["delta"], reason["choices"][0]["finish_reason"]) == ({}, "stop")
            assert all(chunk["usage"] is None for chunk in found[:-1])
            assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 22)
            whole = await ask(client)
            assert usage["usage"] == whole["usage"]
            assert usage["metrics"] == whole["metrics"]
            made = whole["metrics"]["speculative_decoding"]
            assert len(middle) < 22
            # every token is one that a draft brought, or the one token of a step
            assert made["num_accepted_draft_tokens"] + len(middle) == 22
            assert sum(made["acceptance_histogram"]) == made["num_spec_steps"]
            assert len(made["acceptance_histogram"]) == made["num_spec_tokens"] + 1 == 5

    run(main())


def test_usage_is_in_every_chunk_if_asked_for() -> None:
    async def main() -> None:
        async with client_of(scripted("Hello")) as client:
            options = {"include_usage": True, "continuous_usage_stats": True}
            found = await chunks_of(client, stream_options=options)
            counts = [chunk["usage"]["completion_tokens"] for chunk in found]
            assert counts == sorted(counts)
            assert counts[-1] == 5
            plain = await chunks_of(client)
            assert all("usage" not in chunk for chunk in plain)

    run(main())


def test_metrics_of_speculation() -> None:
    async def main() -> None:
        async with client_of(scripted("ababababab")) as client:
            drafted = (await ask(client))["metrics"]["speculative_decoding"]
            steps, accepted = drafted["num_spec_steps"], drafted["num_accepted_draft_tokens"]
            assert accepted > 0
            assert drafted["mean_acceptance_length"] == 1 + accepted / steps
            assert drafted["draft_acceptance_rate"] == accepted / drafted["num_draft_tokens"]
            assert sum(i * n for i, n in enumerate(drafted["acceptance_histogram"])) == accepted
            short = await ask(client, speculative={"num_speculative_tokens": 2, "method": "ngram"})
            assert short["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2
            for body in ({"speculative": {"enabled": False}}, {"speculative": {"num_speculative_tokens": 0}}, {"n": 2}):
                assert (await ask(client, **body))["metrics"] == {"speculative_decoding": None}
            nothing = await ask(client, max_tokens=1)
            assert nothing["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0] * 5
        async with client_of(scripted("ababababab", drafts=False)) as client:
            assert (await ask(client))["metrics"] == {"speculative_decoding": None}

    run(main())


def test_choices() -> None:
    async def main() -> None:
        async with client_of(scripted("Hello")) as client:
            whole = await ask(client, n=3, temperature=2.0, seed=1, max_tokens=12)
            texts = [choice["message"]["content"] for choice in whole["choices"]]
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
            found = await chunks_of(client, n=3, temperature=2.0, seed=1, max_tokens=12, **COUNTED)
            assert [joined(found, index=index) for index in range(3)] == texts
            assert found[-1]["usage"] == whole["usage"]
            assert whole["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")
            roles = [c["index"] for chunk in found for c in chunk["choices"] if "role" in c["delta"]]
            assert sorted(roles) == [0, 1, 2]

    run(main())


def test_pieces_say_where_tokens_come_from() -> None:
    async def main() -> None:
        async with client_of(scripted("abcabcabcabc")) as client:
            found = await chunks_of(client, outpace={"pieces": True})
            pieces = [piece for chunk in found for piece in chunk.get("outpace", {"pieces": []})["pieces"]]
            assert "".join(text for text, _ in pieces) == "abcabcabcabc"
            assert {source for _, source in pieces} == {"output", None}
            assert "outpace" not in (await chunks_of(client))[1]

    run(main())


def test_token_ids() -> None:
    async def main() -> None:
        llm = scripted("Hello")
        async with client_of(llm) as client:
            whole = await ask(client, return_token_ids=True)
            assert llm.tokenizer.decode(whole["prompt_token_ids"]) == "user: Hi\nassistant: "
            assert llm.tokenizer.decode(whole["choices"][0]["token_ids"], False) == "Hello</s>"
            found = await chunks_of(client, return_token_ids=True)
            assert [chunk.get("prompt_token_ids") for chunk in found][:2] == [whole["prompt_token_ids"], None]
            ids = [chunk["choices"][0].get("token_ids") or [] for chunk in found]
            assert flat(ids) == whole["choices"][0]["token_ids"]

    run(main())


def test_log_probabilities() -> None:
    async def main() -> None:
        async with client_of(scripted("Hé")) as client:
            whole = await ask(client, logprobs=True, top_logprobs=2)
            content = whole["choices"][0]["logprobs"]["content"]
            assert [item["token"] for item in content] == ["H", "\ufffd", "\ufffd", "</s>"]
            assert [item["bytes"] for item in content] == [[72], None, None, list(b"</s>")]
            assert all(len(item["top_logprobs"]) == 2 for item in content)
            assert all(item["top_logprobs"][0]["logprob"] == item["logprob"] for item in content)
            found = await chunks_of(client, logprobs=True, top_logprobs=2)
            parts = [chunk["choices"][0]["logprobs"] for chunk in found]
            assert flat(part["content"] for part in parts if part) == content
            as_ids = await ask(client, logprobs=True, return_tokens_as_token_ids=True)
            first = as_ids["choices"][0]["logprobs"]["content"][0]
            assert first["token"].startswith("token_id:") and first["top_logprobs"] == []
            prompt = await ask(client, prompt_logprobs=1)
            assert prompt["prompt_logprobs"][0] is None
            assert len(prompt["prompt_logprobs"]) == prompt["usage"]["prompt_tokens"]
            assert set(next(iter(prompt["prompt_logprobs"][1].values()))) == {"logprob", "rank", "decoded_token"}

    run(main())


def test_stop_and_length() -> None:
    async def main() -> None:
        async with client_of(scripted("one two three")) as client:
            stopped = (await ask(client, stop=" th"))["choices"][0]
            assert (stopped["message"]["content"], stopped["stop_reason"]) == ("one two", " th")
            for name in ("max_tokens", "max_completion_tokens"):
                cut = (await ask(client, **{name: 3}))["choices"][0]
                assert (cut["message"]["content"], cut["finish_reason"]) == ("one", "length")
            last = (await chunks_of(client, stop=[" th"]))[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", " th")

    run(main())


def test_reasoning_is_split_off() -> None:
    async def main() -> None:
        answer = "<think>\nhmm\n</think>\n\nYes."
        async with client_of(scripted(answer, THINKING)) as client:
            message = (await ask(client))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hmm", "Yes.")
            found = await chunks_of(client)
            assert joined(found, "reasoning_content") == "hmm"
            assert joined(found) == "Yes."
            assert all(chunk["choices"][0]["delta"] for chunk in found[:-1])
            assert "reasoning_content" not in (await ask(client, include_reasoning=False))["choices"][0]["message"]
            assert joined(await chunks_of(client, include_reasoning=False), "reasoning_content") == ""
        async with client_of(scripted("hmm</think>Yes.", THINKING)) as client:
            opened = await ask(client, chat_template_kwargs={"mood": "x"}, messages=[*USER, thought()])
            assert opened["choices"][0]["message"]["content"] == "hmm</think>Yes."
        template = THINKING.replace("assistant: ", "assistant: <think>\n")
        async with client_of(scripted("hmm</think>Yes.", template)) as client:
            message = (await ask(client))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hmm", "Yes.")
        async with client_of(scripted("null", template)) as client:
            structured = await ask(client, structured_outputs={"choice": ["null"]})
            assert structured["choices"][0]["message"]["content"] == "null"
        async with client_of(scripted(answer), ServerSettings(reasoning_parser="qwen3")) as client:
            assert (await ask(client))["choices"][0]["message"]["content"] == "Yes."

    def thought() -> dict[str, str]:
        return {"role": "assistant", "content": "b", "reasoning_content": "a"}

    run(main())


def test_tool_calls() -> None:
    async def main() -> None:
        async with client_of(scripted(f"Let me see.\n{CALL}", HERMES)) as client:
            choice = (await ask(client, tools=TOOLS))["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "Let me see."
            (call,) = choice["message"]["tool_calls"]
            assert (call["type"], call["function"]["name"]) == ("function", "weather")
            assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
            found = await chunks_of(client, tools=TOOLS, logprobs=True)
            deltas = [item for chunk in found for c in chunk["choices"] for item in c["delta"].get("tool_calls") or []]
            assert [set(item) >= {"id", "type"} for item in deltas] == [True] + [False] * (len(deltas) - 1)
            arguments = "".join(item["function"]["arguments"] for item in deltas)
            assert json.loads(arguments) == {"city": "Oslo"}
            assert joined(found) == "Let me see."
            assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
            assert all(chunk["choices"][0]["delta"] for chunk in found[:-1])
            # a log probability for every token, also of those that became part of no delta
            parts = [chunk["choices"][0]["logprobs"] for chunk in found]
            tokens = [item["token"] for part in parts if part for item in part["content"]]
            assert "".join(tokens) == f"Let me see.\n{CALL}</s>"
            none = (await ask(client, tools=TOOLS, tool_choice="none"))["choices"][0]
            assert (none["message"]["content"], none["finish_reason"]) == (f"Let me see.\n{CALL}", "stop")
            cut = (await ask(client, tools=TOOLS, max_tokens=30))["choices"][0]
            assert cut["finish_reason"] == "length"

    run(main())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_choice_prescribes_the_answer(choice: Any) -> None:
    async def main() -> None:
        llm = scripted("", HERMES)
        prescribed = llm.tokenizer.encode(CALL[: CALL.index("Oslo")])
        llm.model.answer = "x" * len(prescribed) + CALL[CALL.index("Oslo") :]
        async with client_of(llm) as client:
            found = (await ask(client, tools=TOOLS, tool_choice=choice, max_tokens=300))["choices"][0]
            (call,) = found["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
            assert found["finish_reason"] == "tool_calls"
            for body, param in (
                ({"response_format": {"type": "json_object"}}, "response_format"),
                ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ):
                error = await refused(client, CHAT, messages=USER, tools=TOOLS, tool_choice=choice, **body)
                assert error["param"] == param

    run(main())


def test_response_formats() -> None:
    async def main() -> None:
        async with client_of(scripted('{"a": 1}')) as client:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            for form in (named, {"type": "json_object"}, {"type": "text"}):
                found = await ask(client, response_format=form)
                assert json.loads(found["choices"][0]["message"]["content"]) == {"a": 1}
        async with client_of(scripted("no")) as client:
            found = await ask(client, structured_outputs={"choice": ["nay", "yes"]})
            assert found["choices"][0]["message"]["content"] == "nay"

    run(main())


def test_the_last_message_can_be_continued_and_echoed() -> None:
    async def main() -> None:
        llm = scripted("world.")
        async with client_of(llm) as client:
            messages = [*USER, {"role": "assistant", "content": "Hello, "}]
            found = await ask(client, messages=messages, continue_final_message=True, return_token_ids=True, echo=True)
            assert llm.tokenizer.decode(found["prompt_token_ids"]) == "user: Hi\nassistant: Hello, "
            assert found["choices"][0]["message"]["content"] == "Hello, world."
            chunks = await chunks_of(client, messages=messages, continue_final_message=True, echo=True)
            assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:2]] == ["", "Hello, "]
            assert joined(chunks) == "Hello, world."
            bare = await ask(client, add_generation_prompt=False, return_token_ids=True)
            assert llm.tokenizer.decode(bare["prompt_token_ids"]) == "user: Hi\n"

    run(main())


def test_messages_reach_the_template() -> None:
    async def main() -> None:
        llm = scripted()

        async def prompt(*messages: dict[str, Any], **body: Any) -> str:
            found = await ask(client, messages=list(messages), return_token_ids=True, **body)
            return llm.tokenizer.decode(found["prompt_token_ids"])

        async with client_of(llm, ServerSettings()) as client:
            parts = [{"type": "text", "text": "a", "cache_control": 1}, {"type": "text", "text": "b"}]
            assert await prompt({"role": "user", "content": parts, "odd": 1}) == "user: a\nb\nassistant: "
            assert await prompt({"role": "developer", "content": "x"}) == "system: x\nassistant: "
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
            shown = await prompt({"role": "assistant", "content": None, "tool_calls": [call]})
            assert "'arguments': {'a': [1]}" in shown
            garbled = {**call, "function": {"name": "f", "arguments": '{"a": '}}
            shown = await prompt({"role": "assistant", "tool_calls": [garbled]})
            assert "'arguments': '{\"a\": '" in shown
            assert await prompt(*USER, chat_template_kwargs={"mood": "sad "}) == "user: Hi\nsad assistant: "
        async with client_of(llm := scripted(), ServerSettings(chat_template="T{{ messages[0].content }}")) as client:
            assert await prompt(*USER) == "THi"
        template = "{{ reasoning_effort }}{{ documents | length }}{{ messages[0].content }}"
        async with client_of(llm := scripted(template=template)) as client:
            assert await prompt(*USER, reasoning_effort="low", documents=[{"text": "d"}]) == "low1Hi"

    run(main())


def test_a_seed_of_the_server_makes_answers_repeat() -> None:
    async def main() -> None:
        body = {"temperature": 3.0, "max_tokens": 20}
        async with client_of(scripted(), ServerSettings(seed=7)) as client:
            first, second = [(await ask(client, **body))["choices"] for _ in range(2)]
            other = (await ask(client, seed=8, **body))["choices"]
            assert first == second != other

    run(main())


def test_prompts_are_logged_only_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main(settings: ServerSettings) -> None:
        async with client_of(scripted("a secret answer"), settings) as client:
            messages = [{"role": "user", "content": "a secret question"}]
            await ask(client, messages=messages)
            await chunks_of(client, messages=messages)
            await refused(client, CHAT, messages=messages, temperature=-1)
            await client.post("/v1/completions", json={"prompt": "a secret question"})

    caplog.set_level("DEBUG")
    run(main(ServerSettings()))
    assert "secret" not in caplog.text
    run(main(ServerSettings(log_prompts=True)))
    assert caplog.text.count("a secret question") == 4
    assert caplog.text.count("a secret answer") == 3

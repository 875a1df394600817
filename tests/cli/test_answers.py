"""`outpace generate` with several answers and with log probabilities."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from outpace.engine.outputs import CompletionOutput, Logprob, RequestOutput, RequestStats, StreamChunk
from outpace.params import SamplingParams, SpeculationParams
from tests.cli.stand_in import BANNER, Script, StandIn

TEA = {7: Logprob(-0.25, 1, "Tea"), 8: Logprob(-1.5, 2, "Coffee")}
HOT = {9: Logprob(float("-inf"), 3, " hot"), 7: Logprob(-0.125, 1, "Tea")}
TEA_LINES = ["  'Tea' -0.250 (rank 1); others: 'Coffee' -1.500", "  ' hot' -inf (rank 3); others: 'Tea' -0.125"]


@dataclass
class Several(StandIn):
    """Streams the words of every answer in turn, as an engine with n requests does."""

    answers: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None

    def stream(
        self, prompt: Any, params: SamplingParams, speculation: SpeculationParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        self.requests.append((prompt, params, speculation or SpeculationParams()))
        output = RequestOutput(0, None, [4, 7], self.answers, RequestStats(), self.prompt_logprobs)
        yield StreamChunk("", [], (), (1, 2), False, None)
        for place in range(2):
            for choice in self.answers:
                last = place == 1 and choice is self.answers[-1]
                half = choice.text[:3] if place == 0 else choice.text[3:]
                yield StreamChunk(half, [], (), None, place == 1, output if last else None, choice.index)


def answer(index: int, text: str, logprobs: list[Any] | None = None) -> CompletionOutput:
    return CompletionOutput(index, text, [7, 9], "stop", None if index else "!", logprobs)


def test_several_answers_come_whole_under_headings(outpace) -> None:
    llm = Several(Script(), answers=[answer(0, "Tea is hot"), answer(1, "No, tea\nis wet")])
    result = outpace("generate", "Hi", "--n", "2", llm=llm)
    assert result.code == 0
    assert result.out == "--- answer 1 of 2 ---\nTea is hot\n--- answer 2 of 2 ---\nNo, tea\nis wet\n"
    assert result.err.splitlines()[-1] == BANNER
    assert llm.requests[0][1].n == 2


def test_one_answer_has_no_heading(outpace) -> None:
    llm = Several(Script(), answers=[answer(0, "Tea is hot")])
    assert outpace("generate", "Hi", "--n", "1", llm=llm).out == "Tea is hot\n"


def test_several_answers_as_json(outpace) -> None:
    llm = Several(Script(), answers=[answer(0, "Tea is hot"), answer(1, "Tea is wet")])
    record = json.loads(outpace("generate", "Hi", "--n", "2", "--json", llm=llm).out)
    assert list(record) == ["text", "token_ids", "finish_reason", "choices", "stats"]
    assert (record["text"], record["token_ids"], record["finish_reason"]) == ("Tea is hot", [7, 9], "stop")
    rest = {"token_ids": [7, 9], "finish_reason": "stop"}
    assert record["choices"] == [
        {"index": 0, "text": "Tea is hot", "stop_reason": "!", **rest},
        {"index": 1, "text": "Tea is wet", "stop_reason": None, **rest},
    ]


def test_log_probabilities_are_notes_after_the_text(outpace) -> None:
    llm = Several(Script(), answers=[answer(0, "Tea hot", [TEA, HOT])])
    result = outpace("generate", "Hi", "--logprobs", "1", llm=llm)
    assert result.out == "Tea hot\n"
    assert result.err.partition(BANNER + "\n")[2].splitlines() == ["log probabilities of the answer:", *TEA_LINES]


def test_log_probabilities_of_several_answers_and_of_the_prompt(outpace) -> None:
    answers = [answer(0, "Tea hot", [TEA, HOT]), answer(1, "Tea hot", [TEA, HOT])]
    llm = Several(Script(), answers=answers, prompt_logprobs=[None, TEA])
    result = outpace("generate", "Hi", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "1", llm=llm)
    assert result.err.partition(BANNER + "\n")[2].splitlines() == [
        "log probabilities of the prompt:", "  4: -", TEA_LINES[0],
        "log probabilities of answer 1:", *TEA_LINES, "log probabilities of answer 2:", *TEA_LINES,
    ]  # fmt: skip


def test_log_probabilities_as_json_have_null_for_what_is_impossible(outpace) -> None:
    llm = Several(Script(), answers=[answer(0, "Tea hot", [TEA, HOT])], prompt_logprobs=[None, TEA])
    result = outpace("generate", "Hi", "--logprobs", "1", "--prompt-logprobs", "1", "--json", llm=llm)
    record = json.loads(result.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    tea = {
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": "Tea"},
        "8": {"logprob": -1.5, "rank": 2, "decoded_token": "Coffee"},
    }
    hot = {
        "9": {"logprob": None, "rank": 3, "decoded_token": " hot"},
        "7": {"logprob": -0.125, "rank": 1, "decoded_token": "Tea"},
    }
    assert record["logprobs"] == [tea, hot]
    assert record["prompt_logprobs"] == [None, tea]
    assert result.err.splitlines()[-1] == BANNER


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--n", "0"], "--n=0"),
        (["--n", "129"], "--n=129"),
        (["--logprobs", "-2"], "--logprobs=-2"),
        (["--logprobs", "many"], "--logprobs"),
        (["--prompt-logprobs", "-2"], "--prompt-logprobs=-2"),
        (["--logprobs-mode", "raw"], "--logprobs-mode='raw'"),
    ],
)
def test_impossible_answers_are_refused_before_anything_loads(outpace, words: list[str], shown: str) -> None:
    result = outpace("generate", "Hi", *words)
    assert (result.code, result.out, result.llm.opened) == (2, "", [])
    assert shown in result.err

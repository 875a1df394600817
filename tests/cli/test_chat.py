"""`outpace chat`: history, commands, and what ends it, with and without a terminal."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Iterator

import pytest

from outpace.errors import InvalidPrompt
from tests.cli.stand_in import BANNER, WORDS, Script, StandIn

TEXT = "".join(WORDS)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": TEXT}


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):
    def feed(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return feed


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch):
    """Puts a person at a terminal who types these lines (or presses Ctrl-C) and then Ctrl-D."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def feed(*lines: str | type[BaseException]) -> None:
        rest: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

        def read(prompt: str) -> str:
            line = next(rest)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(builtins, "input", read)

    return feed


def test_every_line_is_a_turn_and_the_history_grows(outpace, pipe) -> None:
    pipe("one\n\n  two\nlast without a line break")
    result = outpace("chat")
    assert (result.code, result.out) == (0, f"{TEXT}\n" * 3)
    assert [prompt for prompt, _, _ in result.llm.requests] == [
        [user("one")],
        [user("one"), ANSWER, user("  two")],
        [user("one"), ANSWER, user("  two"), ANSWER, user("last without a line break")],
    ]
    assert BANNER in result.err


def test_reset_forgets_and_stats_show_the_last_answer(outpace, pipe) -> None:
    pipe("/stats\none\n/stats\n/reset\ntwo\n/help\n")
    result = outpace("chat")
    assert result.code == 0
    assert [prompt for prompt, _, _ in result.llm.requests] == [[user("one")], [user("two")]]
    assert result.err.count("Nothing has been answered yet.") == 1
    assert result.err.count("2 of 10 draft tokens accepted") == 1
    assert "Ctrl-D ends" in result.err


def test_json_is_one_object_a_turn(outpace, pipe) -> None:
    pipe("one\ntwo\n")
    records = [json.loads(line) for line in outpace("chat", "--json").out.splitlines()]
    assert [record["text"] for record in records] == [TEXT, TEXT]


def test_stats_follow_every_answer(outpace, pipe) -> None:
    pipe("one\ntwo\n")
    assert outpace("chat", "--stats").err.count("2 of 10 draft tokens accepted") == 2


def test_an_unknown_command_ends_a_script_but_a_path_is_a_message(outpace, pipe) -> None:
    pipe("/etc/hosts is what?\n/rest\nnever\n")
    result = outpace("chat")
    assert result.code == 2
    assert [prompt for prompt, _, _ in result.llm.requests] == [[user("/etc/hosts is what?")]]
    assert "/rest is not a command" in result.err


def test_a_turn_too_long_ends_a_script(outpace, pipe) -> None:
    pipe("one\n")
    result = outpace("chat", script=Script(fault=InvalidPrompt("9000 tokens, 8192 fit")))
    assert (result.code, result.err.splitlines()[-1]) == (2, "outpace: 9000 tokens, 8192 fit")


class Forgetful(StandIn):
    """Answers one message; a longer conversation does not fit."""

    def stream(self, prompt, params, speculation=None):
        self.script.fault = InvalidPrompt("9000 tokens, 8192 fit") if len(prompt) > 1 else None
        return super().stream(prompt, params, speculation)


def test_a_conversation_too_long_points_to_reset_which_helps(outpace, type_in) -> None:
    type_in("one", "two", "/reset", "three")
    result = outpace("chat", llm=Forgetful(Script()))
    assert (result.code, result.out) == (0, f"{TEXT}\n" * 2)
    assert (
        "outpace: 9000 tokens, 8192 fit\n/reset forgets the conversation so far, if that made it too long\n"
        in result.err
    )


def test_a_terminal_goes_on_after_errors_and_ends_with_ctrl_d(outpace, type_in) -> None:
    type_in("/rest", "one", KeyboardInterrupt, "two")
    result = outpace("chat")
    assert result.code == 0
    assert [prompt for prompt, _, _ in result.llm.requests] == [[user("one")], [user("one"), ANSWER, user("two")]]
    assert "/rest is not a command" in result.err


def test_ctrl_c_stops_an_answer_and_forgets_the_turn(outpace, type_in) -> None:
    class Impatient(StandIn):
        def stream(self, prompt, params, speculation=None):
            self.script.fault = KeyboardInterrupt() if len(self.requests) == 1 else None
            return super().stream(prompt, params, speculation)

    type_in("one", "two", "three")
    result = outpace("chat", llm=Impatient(Script()))
    assert result.code == 0
    assert result.llm.closed == 3
    assert result.llm.requests[2][0] == [user("one"), ANSWER, user("three")]


def test_ctrl_c_without_a_terminal_ends_the_command(outpace, pipe) -> None:
    pipe("one\ntwo\n")
    result = outpace("chat", script=Script(fault=KeyboardInterrupt()))
    assert (result.code, len(result.llm.requests)) == (130, 1)


def test_a_model_without_a_chat_template_is_refused(outpace, pipe) -> None:
    pipe("one\n")
    result = outpace("chat", llm=StandIn(Script(), chat_template=False))
    assert (result.code, result.llm.requests) == (2, [])
    assert "no chat template" in result.err

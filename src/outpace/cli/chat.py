"""`outpace chat`: a conversation, on a terminal or one turn a line from standard input."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outpace.cli.backend import Backend, has_chat_template, open_llm, print_config, stream
from outpace.cli.generate import stream_answer
from outpace.cli.options import engine_config, speculative_config
from outpace.cli.report import control_lines, result_object, stats_lines
from outpace.cli.sampling import sampling_params
from outpace.cli.streams import say, standard_input
from outpace.errors import BadInput, InvalidPrompt

if TYPE_CHECKING:
    from outpace.engine.outputs import RequestOutput
    from outpace.llm import LLM
    from outpace.params import SamplingParams

__all__ = ["run"]

_HELP = "/reset forgets the conversation, /stats shows the last answer's numbers, Ctrl-C stops an answer, Ctrl-D ends."


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Talks until the input ends. On a terminal an error ends a turn; elsewhere it ends the command.

    Raises:
        OutpaceError: bad options, a model that cannot be run, or (without a terminal) a turn that cannot be answered.
    """
    params = sampling_params(arguments)
    engine_config(arguments), speculative_config(arguments)  # refuse bad options before anything is loaded
    interactive = not arguments.print_config and standard_input().isatty()
    llm = open_llm(backend, arguments, announce=not arguments.print_config)
    if arguments.print_config:
        print_config(llm, params)
        return 0
    if not has_chat_template(llm):
        raise BadInput("this model has no chat template; use `outpace generate`, or a model made for chat (-Instruct)")
    if interactive:
        say(f"/help for help. {_HELP}")
    conversation = Conversation(llm, params, as_json=arguments.json, show_stats=arguments.stats)
    for line in _terminal_lines() if interactive else _piped_lines():
        try:
            conversation.turn(line)
        except BadInput as error:
            if not interactive:
                raise
            say(f"outpace: {error}")
    return 0


class Conversation:
    """Messages so far, and what a line of input does to them.

    Args:
        as_json: print one JSON object a turn in place of the text.
        show_stats: show the numbers after every answer.
    """

    def __init__(self, llm: LLM, params: SamplingParams, *, as_json: bool, show_stats: bool) -> None:
        self.messages: list[dict[str, str]] = []
        self._llm = llm
        self._params = params
        self._as_json = as_json
        self._show_stats = show_stats
        self._last: RequestOutput | None = None

    def turn(self, line: str) -> None:
        """Obeys a command or answers a message; a turn that fails or is interrupted leaves the history as it was.

        Raises:
            BadInput: the message cannot be answered.
        """
        text = line.strip()
        if re.fullmatch(r"/\w+", text):
            self._command(text)
        elif text:
            self._answer(line)

    def _command(self, word: str) -> None:
        if word == "/help":
            say(_HELP)
        elif word == "/reset":
            self.messages.clear()
            say("The conversation starts anew.")
        elif word == "/stats":
            self._say_stats()
        else:
            raise BadInput(f"{word} is not a command. {_HELP}")

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            output = stream_answer(stream(self._llm, messages, self._params), show=not self._as_json)
        except InvalidPrompt as error:
            if not self.messages:
                raise
            raise InvalidPrompt(f"{error}\n/reset forgets the conversation so far, if that made it too long") from None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("\n(stopped; this turn is forgotten)")
            return
        answer = {"role": "assistant", "content": output.outputs[0].text}
        self.messages, self._last = [*messages, answer], output
        if self._as_json:
            print(json.dumps(result_object(output), allow_nan=False), flush=True)
        if self._show_stats:
            self._say_stats()

    def _say_stats(self) -> None:
        if self._last is None:
            say("Nothing has been answered yet.")
            return
        lines = stats_lines(self._last.stats, len(self._last.prompt_token_ids))
        for line in [*lines, *control_lines(self._llm.control())]:
            say(line)


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except UnicodeError:
        raise InvalidPrompt("standard input is not valid UTF-8 text") from None


def _terminal_lines() -> Iterator[str]:
    try:
        import readline  # noqa: F401  (line editing and history, where the platform has it)
    except ImportError:
        say("(no line editing on this platform)")
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends.")

"""`outpace generate PROMPT`: one prompt, its answer as it comes."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import TYPE_CHECKING

from outpace.cli.backend import Backend, has_chat_template, open_llm, print_config, stream
from outpace.cli.options import engine_config, speculative_config
from outpace.cli.progress import PromptProgress
from outpace.cli.report import control_lines, logprob_lines, result_object, stats_lines
from outpace.cli.sampling import sampling_params
from outpace.cli.streams import say, standard_input
from outpace.errors import BadInput, InvalidPrompt

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from outpace.engine.outputs import RequestOutput, StreamChunk, TokenLogprobs

__all__ = ["add_arguments", "run", "stream_answer"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what only this command takes."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send PROMPT as one chat message, or (--no-chat) continue it as plain text; "
        "default: chat if the model has a chat template",
    )


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Generates and prints: text alone on standard output, or one JSON object.

    Raises:
        OutpaceError: bad input, or a model that cannot be run.
    """
    params = sampling_params(arguments)
    engine_config(arguments), speculative_config(arguments)  # refuse bad options before anything is read or loaded
    prompt = None if arguments.print_config else read_prompt(arguments.prompt)
    llm = open_llm(backend, arguments, announce=prompt is not None)
    if prompt is None:
        print_config(llm, params)
        return 0
    as_chat = has_chat_template(llm) if arguments.chat is None else arguments.chat
    request: str | list[dict[str, str]] = [{"role": "user", "content": prompt}] if as_chat else prompt
    output = stream_answer(stream(llm, request, params), show=not arguments.json and params.n == 1)
    if arguments.json:
        print(json.dumps(result_object(output), allow_nan=False))
    else:
        show_answers(output)
    if arguments.stats:
        for line in [*stats_lines(output.stats, len(output.prompt_token_ids)), *control_lines(llm.control())]:
            say(line)
    return 0


def show_answers(output: RequestOutput) -> None:
    """Prints what a stream of one text does not show: several answers, and log probabilities (as notes)."""
    several = len(output.outputs) > 1
    if output.prompt_logprobs is not None:
        _say_logprobs("of the prompt", output.prompt_logprobs, output.prompt_token_ids)
    for choice in output.outputs:
        if several:
            print(f"--- answer {choice.index + 1} of {len(output.outputs)} ---\n{choice.text}", flush=True)
        if choice.logprobs is not None:
            title = f"of answer {choice.index + 1}" if several else "of the answer"
            _say_logprobs(title, choice.logprobs, choice.token_ids)


def _say_logprobs(title: str, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> None:
    say(f"log probabilities {title}:")
    for line in logprob_lines(logprobs, token_ids):
        say("  " + line)


def read_prompt(argument: str | None) -> str:
    """The prompt as given, or standard input for `-`, its last line break removed.

    Raises:
        BadInput: there is none, it is empty, or it is not UTF-8; or standard input is closed.
    """
    if argument is None:
        raise BadInput('a prompt is missing: outpace generate "Once upon a time", or - to read standard input')
    try:
        prompt = standard_input().read().removesuffix("\n") if argument == "-" else argument
        prompt.encode("utf-8")
    except UnicodeError:
        raise InvalidPrompt("the prompt is not valid UTF-8 text") from None
    if not prompt:
        raise InvalidPrompt("the prompt is empty: give at least one character")
    return prompt


def stream_answer(chunks: Generator[StreamChunk, None, None], show: bool) -> RequestOutput:
    """Follows a stream to its end; if the prompt takes long to read, standard error sees how far it is.

    Args:
        show: write the text to standard output as it comes, and a line break at the end.

    Returns:
        the finished request.

    Raises:
        RuntimeError: the stream ended without a result.
    """
    output = None
    with closing(chunks), PromptProgress() as reading:
        for chunk in chunks:
            if chunk.prefill:
                reading.report(*chunk.prefill)
                continue
            reading.finish()
            if show:
                print(chunk.text, end="", flush=True)
            output = chunk.output or output
    if show:
        print(flush=True)
    if output is None:
        raise RuntimeError("the stream ended without a result")
    return output

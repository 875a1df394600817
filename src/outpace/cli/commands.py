"""The commands and their options: which there are, and what each one takes."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import outpace
from outpace.cli import chat, demo, doctor, export, generate, swap, train
from outpace.cli.backend import Backend
from outpace.cli.options import (
    Parser,
    add_engine_options,
    add_output_options,
    add_speculation_options,
)
from outpace.cli.sampling import add_answer_options, add_sampling_options
from outpace.cli.train_from import with_kind
from outpace.errors import BadInput

__all__ = ["run_command"]

_COMMANDS = ("generate", "chat", "demo", "doctor", "export", "serve", "swap", "train")
_MODEL_DEFAULTS = "What is left out follows the model's generation config, else temperature 0 and at most 512 tokens."
_DEMO_DEFAULTS = "Temperature 0, seed 0 and each task's own length, unless given."


def run_command(arguments: Sequence[str], backend: Backend | None) -> int:
    """Runs the command that the arguments name. Returns its exit code.

    Args:
        arguments: as on the command line, without the program's name.
        backend: where engines come from; None takes the real ones.

    Raises:
        BadInput: there is no such command, an option is unknown, or its value is not possible.
        SystemExit: after `--help` and `--version`.
    """
    _check_command(arguments)
    if arguments[0] == "serve":
        # It reads its own command line, which is vLLM's; imported here, because nothing else needs it.
        served: int = import_module("outpace.cli.serve").run(arguments[1:])
        return served
    options = _parser().parse_args(with_kind(arguments))
    code: int = options.run(options, backend or Backend())
    return code


def _check_command(arguments: Sequence[str]) -> None:
    """Refuses what names no command in words of our own: argparse's do not say what would work."""
    possible = f"{', '.join(_COMMANDS[:-1])} or {_COMMANDS[-1]}"
    if not arguments:
        raise BadInput(f"a command is missing: {possible}\nSee `outpace --help`.")
    word = arguments[0]
    if word.startswith("-") or word in _COMMANDS:
        return
    near = get_close_matches(word, _COMMANDS, n=1)
    raise BadInput(
        f"{word!r} is not a command: {f'did you mean {near[0]}?' if near else possible}\nSee `outpace --help`."
    )


def _parser() -> Parser:
    parser = Parser(
        prog="outpace",
        description="Runs language models with speculative decoding: the same words, sooner.",
        epilog="Every command has its own --help. `outpace demo` is a good first one.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outpace {outpace.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _command(commands, "generate", "answer one prompt", generate.run)
    generate.add_arguments(command)
    add_engine_options(command)
    add_speculation_options(command)
    add_sampling_options(command, _MODEL_DEFAULTS)
    add_answer_options(command)
    contents = "text, token_ids, finish_reason, stats; choices and logprobs if asked for"
    add_output_options(command, f"print one JSON object ({contents}) and nothing else")

    command = _command(commands, "chat", "talk with a model", chat.run)
    add_engine_options(command)
    add_speculation_options(command)
    add_sampling_options(command, _MODEL_DEFAULTS)
    add_output_options(command, "print one JSON object a turn")

    command = _command(commands, "demo", "see plain and speculative decoding side by side", demo.run)
    add_engine_options(command, {"model": "the largest on this machine"})
    add_speculation_options(command)
    add_sampling_options(command, _DEMO_DEFAULTS)
    add_output_options(command, "print one JSON object with the measurements and nothing else")

    command = _command(
        commands, "doctor", "look at this machine, and what to expect from speculation on it", doctor.run
    )
    add_engine_options(command, doctor.DEFAULTS, only=doctor.OPTIONS)
    add_output_options(command, "print one JSON object with all that was found and nothing else", only_json=True)
    train.add_commands(_command(commands, "train", "train a drafter for a model, on this machine", None))

    command = _command(commands, "export", "write an EAGLE-3 head as another engine reads it", export.run)
    export.add_arguments(command)
    command = _command(commands, "swap", "put a better drafter into a server that is running", swap.run)
    swap.add_arguments(command)
    commands.add_parser("serve", help="serve a model over OpenAI's HTTP interface")
    return parser


def _command(commands, name: str, text: str, run) -> Parser:  # type: ignore[no-untyped-def]
    parser: Parser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser

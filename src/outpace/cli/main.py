"""Entry of the command `outpace`: reads options, runs a command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted, 141 the reader of standard output went away.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import outpace
from outpace.cli import chat, demo, generate
from outpace.cli.backend import Backend
from outpace.cli.options import Parser, add_engine_options, add_output_options, add_sampling_options, hyphenated
from outpace.cli.progress import say
from outpace.errors import OutpaceError

__all__ = ["main"]

_MODEL_DEFAULTS = "What is left out follows the model's generation config, else temperature 0 and at most 512 tokens."
_DEMO_DEFAULTS = "Temperature 0, seed 0 and each task's own length, unless given."


def main(arguments: Sequence[str] | None = None, backend: Backend | None = None) -> int:
    """Runs one command.

    Args:
        arguments: as on the command line, without the program's name; None takes those of the process.
        backend: where engines come from; tests pass their own.

    Returns:
        the exit code.
    """
    try:
        _tolerate_narrow_encodings()
        options = _parser().parse_args(hyphenated(sys.argv[1:] if arguments is None else arguments))
        code: int = options.run(options, backend or Backend())
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse after --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_standard_output()
        return 141
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Says what went wrong and returns the exit code; a trace is for those who ask for it."""
    debugging = os.environ.get("OUTPACE_DEBUG", "") not in ("", "0")
    if isinstance(error, (OutpaceError, OSError)):
        say(f"outpace: {error}")
    else:
        say(f"outpace: this is a bug in outpace ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})")
        if not debugging:
            say("Set OUTPACE_DEBUG=1 to see where it happened.")
    if debugging:
        traceback.print_exception(error)
    return error.exit_code if isinstance(error, OutpaceError) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="outpace",
        description="Runs language models with speculative decoding: the same words, sooner.",
        epilog="Every command has its own --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outpace {outpace.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _command(commands, "generate", "answer one prompt", generate.run)
    generate.add_arguments(command)
    add_engine_options(command)
    add_sampling_options(command, _MODEL_DEFAULTS)
    add_output_options(command, "print one JSON object (text, token_ids, finish_reason, stats) and nothing else")

    command = _command(commands, "chat", "talk with a model", chat.run)
    add_engine_options(command)
    add_sampling_options(command, _MODEL_DEFAULTS)
    add_output_options(command, "print one JSON object a turn")

    command = _command(commands, "demo", "see plain and speculative decoding side by side", demo.run)
    add_engine_options(command, default_model="the largest on this machine")
    add_sampling_options(command, _DEMO_DEFAULTS)
    add_output_options(command, "print one JSON object with the measurements and nothing else")
    return parser


def _command(commands, name: str, text: str, run) -> Parser:  # type: ignore[no-untyped-def]
    parser: Parser = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _tolerate_narrow_encodings() -> None:
    """A terminal that cannot show a character gets a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _forget_standard_output() -> None:
    """Lets the interpreter end quietly although nobody reads what is still buffered."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)

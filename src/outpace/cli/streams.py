"""The standard streams as they are found: closed, unable to show a character, or left by their reader."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from outpace.errors import BadInput

__all__ = ["forget_standard_output", "prepare_streams", "say", "standard_input"]


def say(text: str) -> None:
    """One note for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Makes notes vanish if standard error is closed, and characters a terminal lacks question marks.

    Raises:
        BadInput: standard output is closed.
    """
    if sys.stderr is None:  # a program started with `2>&-`; print would write to standard output instead
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        raise BadInput("standard output is closed: there is nowhere to write to; /dev/null would do")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def standard_input() -> TextIO:
    """Standard input, to read prompts from.

    Raises:
        BadInput: it is closed.
    """
    if sys.stdin is None:
        raise BadInput("standard input is closed: there is nothing to read a prompt from")
    return sys.stdin


def forget_standard_output() -> None:
    """Lets the interpreter end quietly although nobody reads what is still buffered."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)

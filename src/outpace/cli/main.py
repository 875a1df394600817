"""Entry of the command `outpace`: runs a command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted, 141 the reader of standard output went away.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from outpace.cli.streams import forget_standard_output, prepare_streams, say
from outpace.errors import OutpaceError

if TYPE_CHECKING:
    from outpace.cli.backend import Backend

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, backend: Backend | None = None) -> int:
    """Runs one command.

    Args:
        arguments: as on the command line, without the program's name; None takes those of the process.
        backend: where engines come from; tests pass their own.

    Returns:
        the exit code.
    """
    try:
        prepare_streams()
        # Imported here, so that Ctrl-C during the long imports is caught like any other.
        commands = import_module("outpace.cli.commands")
        code: int = commands.run_command(sys.argv[1:] if arguments is None else arguments, backend)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse after --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        forget_standard_output()
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

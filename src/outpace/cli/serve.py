"""`outpace serve`: a model over HTTP. Its options stand in `outpace.server.options`."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.cli.progress import Progress
from outpace.server.main import main

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Serves until a signal ends it. Returns the exit code.

    Raises:
        OutpaceError: bad options, an address that is taken, or a model that cannot be run.
        SystemExit: after `--help`.
    """
    return main(arguments, Progress)

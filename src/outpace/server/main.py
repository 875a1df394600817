"""Starts the server: reads the command line, binds the address, and only then loads what takes long.

Answers `--help`, `--print-config` and bad options without torch.
"""

from __future__ import annotations

import errno
import json
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn, Protocol

from outpace.errors import InvalidParameter, OutpaceError
from outpace.server.arguments import resolve

__all__ = ["QUEUE", "Display", "bind", "main"]

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "openai", "pydantic")
QUEUE = 512
"""Connections that may wait while the model loads, or the server is busy."""


class Display(Protocol):
    """Shows people what is going on."""

    def say(self, text: str) -> None:
        """One line."""
        ...

    def report(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of a long step are ready."""
        ...


def main(argv: Sequence[str], open_display: Callable[[], AbstractContextManager[Display]]) -> int:
    """Serves until a signal ends it.

    Args:
        argv: the command line without the program's name and the command.
        open_display: shows the progress of loading.

    Returns:
        the exit code: 0 after a signal or `--print-config`.

    Raises:
        BadInput: an option is not possible.
        OutpaceError: the address is taken, or the model cannot be run.
        SystemExit: after `--help`, and if SIGTERM comes before the model is ready.
    """
    resolved = resolve(argv)
    if resolved.print_config:
        print(json.dumps(resolved.as_dict(), indent=2))
        return 0
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise OutpaceError(f"the server needs {', '.join(missing)}: pip install 'outpace[server]'")
    with bind(resolved.server.host, resolved.server.port) as listener:
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            with open_display() as display:
                for warning in resolved.warnings:
                    display.say(f"outpace: {warning}")
                # Imported here: they bring torch, which takes seconds to load.
                serving = import_module("outpace.server.serving")
                built = serving.build_engine(resolved, display.say, display.report)
                serving.warm_up(built)
            code: int = serving.serve(built, resolved.server, listener)
            return code
        finally:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, so that nobody else can take it while the model loads.

    Raises:
        OutpaceError: the address is taken, or may not be bound.
        InvalidParameter: the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InvalidParameter(f"--host {host!r} is not possible: {error}; 127.0.0.1 and 0.0.0.0 are usual") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a port would rest for a minute after use
        listener.bind(address)
        listener.listen(QUEUE)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            text = "is taken by another program: stop that one, or give another --port (0 takes a free one)"
            raise OutpaceError(f"{host}:{port} {text}") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise InvalidParameter(f"--host {host!r} is no address of this machine; 0.0.0.0 takes all") from None
        raise OutpaceError(f"{host}:{port} cannot be bound: {error.strerror}") from None
    return listener

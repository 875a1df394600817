"""Connections on which requests have to arrive: one that only holds its place is closed.

uvicorn waits for ever for a request that does not come, or comes byte by byte, and a process may hold only so many
connections: without this, some hundred silent clients would keep everybody else out.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BACKLOG", "PATIENCE", "Connection", "most_connections"]

BACKLOG = 64
"""Connections that are accepted in one go."""
_ROUNDS = 3
"""How often that may happen before a connection that has to make room is really closed."""
_OTHER_FILES = 64
"""Open files of the process that are no connections."""

PATIENCE = 30.0
"""Seconds between two looks at a connection. At the second look at one that is waited for, it is closed."""
_LEAST_BYTES = 1024
"""Of a body, from one look to the next."""


def most_connections() -> int:
    """How many connections there may be before the system refuses to open further ones.

    asyncio answers such a refusal with thousands of lines in the log, and nobody gets in.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if allowed == resource.RLIM_INFINITY else max(1, allowed - _ROUNDS * BACKLOG - _OTHER_FILES)


class _Quieter(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's log, in which bytes that are no HTTP are no warning: anybody may send them, and many."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        self.debug(msg, *args, **kwargs)


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed if no request arrives on it.

    If there are too many, the one gives way that has been waited for the longest.

    From one look to the next a request's head has to be complete, or 1 KiB of its body has to come. How long an answer
    takes, and how slowly it is read, does not matter. A wish to change to WebSockets or HTTP/2 is ignored, which HTTP
    allows.
    """

    _timer: asyncio.TimerHandle | None = None
    _awaited: tuple[object, object] | None = None
    _received = 0
    _made = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _Quieter(self.logger)  # type: ignore[assignment]  # it has what uvicorn uses

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made = time.monotonic()
        if len(self.connections) > most_connections():
            self._make_room()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def shutdown(self) -> None:
        """The server is stopping: a request of which a part has come is not waited for, as it would be refused."""
        if self._waits_for() is None:
            super().shutdown()
        else:
            self.transport.close()

    def _make_room(self) -> None:
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        silent = (other for other in others if other._waits_for() is not None and not other.transport.is_closing())
        min(silent, key=lambda other: other._made, default=self).transport.close()

    def _look(self) -> None:
        awaited = self._waits_for()
        late = awaited is not None and awaited == self._awaited
        if late and (self.conn.their_state is h11.IDLE or self._received < _LEAST_BYTES):
            self.transport.close()
            return
        self._awaited, self._received = awaited, 0
        self._timer = self.loop.call_later(PATIENCE, self._look)

    def _waits_for(self) -> tuple[object, object] | None:
        """What the client owes us: (which part, of the request after or in this cycle); None while we owe an answer."""
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.our_state is h11.IDLE):
            return state, self.cycle
        return None

    def _unsupported_upgrade_warning(self) -> None:
        """No word in the log: uvicorn's advises to install what would not be used, once for many a request."""

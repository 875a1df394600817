"""Connections on which requests have to arrive: one that only holds its place is closed.

uvicorn waits for ever for a request that does not come, or comes byte by byte, and a process may hold only so many
connections: without this, some hundred silent clients would keep everybody else out.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["PATIENCE", "Connection"]

PATIENCE = 30.0
"""Seconds between two looks at a connection. At the second look at one that is waited for, it is closed."""
_LEAST_BYTES = 1024
"""Of a body, from one look to the next."""


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed if no request arrives on it.

    From one look to the next a request's head has to be complete, or 1 KiB of its body has to come. How long an answer
    takes, and how slowly it is read, does not matter. A wish to change to WebSockets or HTTP/2 is ignored, which HTTP
    allows.
    """

    _timer: asyncio.TimerHandle | None = None
    _awaited: tuple[object, object] | None = None
    _received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

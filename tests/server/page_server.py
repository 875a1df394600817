"""A server that shows the page and streams answers from a script, in the form in which ours does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outpace.server.page import load_page

Step = Sequence[tuple[str, "str | None"]]
"""The tokens of one step: text, and the drafter it came from."""
Answer = Iterable[dict[str, Any]]
"""Events of a stream. `[DONE]` follows unless one of them is an error."""


class Refused(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: in the error object.
        headers: more of them.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class PageServer(ThreadingHTTPServer):
    """What it was asked is in `bodies`.

    Args:
        answer: (body of the request) -> the events, or raises Refused.
        key: that it wants, None for none.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()
        """A client went away before its answer ended."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.paths.append(path)
        if path == "/":
            page = load_page()
            self._send(200, page.body, page.headers)
        elif path == "/v1/models" and self._may_pass():
            self._json(200, {"object": "list", "data": [{"id": "org/scripted", "max_model_len": 2048}]})
        elif path != "/v1/models":
            self._refuse(Refused(404, f"there is no {path}"))

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may_pass():
            return
        self.server.bodies.append(body)
        try:
            events = iter(self.server.answer(body))
        except Refused as refused:
            self._refuse(refused)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                self._event(json.dumps(event))
                if "error" in event:
                    return
            self._event("[DONE]")
        except OSError:  # the client has gone
            self.server.gone.set()

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _may_pass(self) -> bool:
        given = self.headers.get("Authorization")
        self.server.keys.append(given)
        if self.server.key is None or given == f"Bearer {self.server.key}":
            return True
        self._refuse(Refused(401, "a valid API key is needed"))
        return False

    def _refuse(self, refused: Refused) -> None:
        error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": None}
        self._json(refused.status, {"error": error}, refused.headers)

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer], key: str | None = None) -> Iterator[PageServer]:
    """A running server."""
    server = PageServer(answer, key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunk(step: Step, finish_reason: str | None = None) -> dict[str, Any]:
    """What one step sends."""
    choice = {"index": 0, "delta": {"content": "".join(text for text, _ in step)}, "finish_reason": finish_reason}
    return {"choices": [choice], "outpace": {"pieces": [list(piece) for piece in step]}}


def counts(steps: Sequence[Step], histogram: list[int] | None, drafted: int = 0) -> dict[str, Any]:
    """The last chunk, with drafts of which exactly j tokens were kept `histogram[j]` times; None decoded plainly."""
    tokens = sum(len(step) for step in steps)
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
    if histogram is None:
        return {"choices": [], "usage": usage, "metrics": {"speculative_decoding": None}}
    drafts = sum(histogram)
    kept = sum(index * count for index, count in enumerate(histogram))
    found = {
        "mean_acceptance_length": 1 + kept / drafts,
        "draft_acceptance_rate": kept / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": kept,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
    return {"choices": [], "usage": usage, "metrics": {"speculative_decoding": found}}

"""What clients are told when something is not possible or fails: OpenAI's error objects.

{"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outpace.errors import BadInput, InvalidPrompt, OutpaceError, QueueFull, RequestCutOff, Unavailable

__all__ = [
    "CLIENT_GONE",
    "ApiError",
    "add_error_handlers",
    "as_api_error",
    "error_body",
    "error_response",
    "unexpected",
]

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status of an answer that nobody reads: the client went away before it began."""

_LEADING_NAME = re.compile(r"([A-Za-z_]\w*)((?:\.\w+|\[\d+\])*)(?=[= ,.:])")
_TOO_LONG = re.compile(r"the prompt has \d+ tokens and the context holds \d+")
"""How the engine says so; a test holds the two together."""

_ELSEWHERE = {
    "/v1/responses": "this server has /v1/chat/completions, which answers the same messages",
    "/v1/embeddings": "this server generates text only: see /v1/chat/completions and /v1/completions",
    "/v1/messages": "this server has /v1/chat/completions, which takes messages in OpenAI's form",
    "/v1/audio": "this server generates text only",
    "/v1/images": "this server generates text only",
    "/v1/moderations": "this server generates text only",
    "/v1/score": "this server generates text only; logprobs of /v1/completions tell how likely a text is",
    "/v1/rerank": "this server generates text only",
    "/v1/assistants": "this server keeps nothing between requests: see /v1/chat/completions",
    "/v1/files": "this server keeps nothing between requests",
    "/v1/batches": "this server keeps nothing between requests; /v1/completions takes a list of prompts",
    "/v1/fine_tuning": "this server generates text only",
    "/v1/load_lora_adapter": "this server runs models without adapters",
    "/generate": "this server has /v1/completions",
    "/v1/tokenize": "this server has it at /tokenize",
    "/v1/detokenize": "this server has it at /detokenize",
    "/chat/completions": "this server has it at /v1/chat/completions: base URLs end in /v1",
    "/completions": "this server has it at /v1/completions: base URLs end in /v1",
    "/models": "this server has it at /v1/models: base URLs end in /v1",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people.
        type: OpenAI's kind of error; None takes the usual one of the status.
        param: the field of the request that is to blame, as `messages[1].role`.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or ("server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def error_body(error: ApiError) -> dict[str, Any]:
    """The error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """The answer. Its JSON is ASCII: what a client sent may not be writable as UTF-8."""
    return Response(
        json.dumps(error_body(error)), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def as_api_error(error: OutpaceError, names: Collection[str] = (), param: str | None = None) -> ApiError:
    """What a client is told about an error of outpace.

    Args:
        error: what was raised.
        names: fields of the request: if the message begins with one of them, that is the field to blame.
        param: the field to blame otherwise.
    """
    message = str(error)
    if isinstance(error, QueueFull):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(429, message, "rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, Unavailable):
        return ApiError(503, message, code="unavailable")
    if isinstance(error, RequestCutOff):
        text = "the server is stopping, and the time to finish this answer was over before it was complete: ask again"
        return ApiError(503, text, code="unavailable")
    if not isinstance(error, BadInput):
        return ApiError(500, message)
    code = None
    if isinstance(error, InvalidPrompt) and _TOO_LONG.match(message):
        code = "context_length_exceeded"
    return ApiError(400, message, param=_blamed(message, names) or param, code=code)


def unexpected(error: BaseException) -> ApiError:
    """What a client is told about a fault of ours; the log has the rest."""
    log.error("a request failed by a fault of the server", exc_info=error)
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says more")


def _blamed(message: str, names: Collection[str]) -> str | None:
    if message.startswith("speculation method ") and "speculative" in names:
        return "speculative.method"
    match = _LEADING_NAME.match(message)
    return match[0] if match and match[1] in names else None


def add_error_handlers(app: FastAPI) -> None:
    """Every error that leaves the application is an error object."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def outpace_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, OutpaceError)
        return error_response(as_api_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_of_http(request, error))

    async def too_deep(request: Request, error: Exception) -> Response:
        return error_response(ApiError(400, "the body is nested too deeply"))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def fault(request: Request, error: Exception) -> Response:
        # uvicorn logs the error, which is raised again behind this
        return error_response(ApiError(500, f"the server failed ({type(error).__name__}); its log says more"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(OutpaceError, outpace_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RecursionError, too_deep)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, fault)


def _of_http(request: Request, error: HTTPException) -> ApiError:
    headers = error.headers or {}
    where = f"{request.method} {request.url.path!r}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework joins a set: sorted here, the same request has the same answer in every process.
        allowed = ", ".join(sorted(headers.get("Allow", "").split(", "))) or "another method"
        headers = {**headers, "Allow": allowed} if "Allow" in headers else headers
        return ApiError(405, f"{where} is not possible: use {allowed}", code="method_not_allowed", headers=headers)
    if error.status_code == HTTPStatus.NOT_FOUND:
        path = request.url.path.rstrip("/")
        pointer = next(
            (text for known, text in _ELSEWHERE.items() if path == known or path.startswith(known + "/")), ""
        )
        known = pointer or "see /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health"
        return ApiError(404, f"there is no {where}: {known}", code="not_found")
    return ApiError(error.status_code, str(error.detail), headers=headers)

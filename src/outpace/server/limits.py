"""What is looked at before a request is read: its key, its size, and that it is JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.server.errors import ApiError, error_response
from outpace.server.settings import ServerSettings

__all__ = ["KeyCheck", "read_json", "tenant_of"]

_GUARDED = ("/v1", "/tokenize", "/detokenize")
_LARGE = 256 * 1024
"""Bytes of JSON from which on it is read in a thread, so that the event loop stays free."""
_DISCARDED = 4
"""A client that sends this many times what is allowed is cut off; with less it gets to read why it was refused."""


class KeyCheck:
    """Lets requests to the API pass only with one of the keys, as bearer token. Other paths are open.

    Args:
        app: behind it.
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_guarded(scope) and not self._knows(Headers(scope=scope)):
            message = "a valid API key is needed: send it in the header `Authorization: Bearer KEY`"
            refused = ApiError(401, message, "authentication_error", code="invalid_api_key")
            refused.headers["WWW-Authenticate"] = "Bearer"
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, given = _bearer(headers)
        # All keys are compared, each in constant time: how long it takes tells nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def tenant_of(request: Request, settings: ServerSettings) -> str:
    """Whose request it is: one tenant a key, and one for all where there are no keys."""
    return _bearer(request.headers)[1].decode("latin-1") if settings.api_keys else ""


def _bearer(headers: Headers) -> tuple[str, bytes]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme, token.strip().encode("latin-1", "replace")


def _is_guarded(scope: Scope) -> bool:
    """With and without the prefix of a proxy: what a route could match is guarded."""
    path: str = scope["path"]
    paths = (path, path.removeprefix(scope.get("root_path", "").rstrip("/")))
    return any(path == guarded or path.startswith(guarded + "/") for path in paths for guarded in _GUARDED)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Args:
        request: not read yet.
        limit: largest body, in bytes.

    Raises:
        ApiError: 415 for another content type, 413 for a body that is too large, 400 for one that is no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another origin can send forms and plain text without asking, but not this.
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"content type {kind!r} is not possible: send JSON with the header `Content-Type: application/json`"
        raise ApiError(415, message, code="unsupported_media_type")
    body = await _read_body(request, limit)
    value = await asyncio.to_thread(_parsed, body) if len(body) > _LARGE else _parsed(body)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {_kind(value)}: it must be an object", code="invalid_json")
    return value


async def _read_body(request: Request, limit: int) -> bytes:
    declared = 0
    with contextlib.suppress(ValueError):
        declared = int(request.headers.get("content-length", "0"))
    parts: list[bytes] = []
    size = 0
    if declared <= limit * _DISCARDED:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                parts.clear()
            else:
                parts.append(part)
            if size > limit * _DISCARDED:
                break
    if max(size, declared) > limit:
        message = f"the body has more than {limit} bytes, which is the most here: send less"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
    return b"".join(parts)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of numbers of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"JSON has no {word}")


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")

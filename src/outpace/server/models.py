"""What the server says about itself: /v1/models, /health, /version."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

import outpace
from outpace.server.envelope import served_by
from outpace.server.errors import ApiError
from outpace.server.served import Served

__all__ = ["health", "list_models", "show_model", "version"]


async def list_models(request: Request) -> Response:
    """The model, under all its names."""
    served = served_by(request)
    return JSONResponse({"object": "list", "data": [_model(served, name) for name in served.names]})


async def show_model(request: Request, name: str) -> Response:
    """One name of the model.

    Raises:
        ApiError: 404.
    """
    served = served_by(request)
    served.check_name(name)
    return JSONResponse(_model(served, name))


async def health(request: Request) -> Response:
    """200 while requests are taken.

    Raises:
        ApiError: 503.
    """
    failure = served_by(request).llm.failure
    if failure is not None:
        raise ApiError(503, failure, code="unavailable")
    return JSONResponse({"status": "ok"})


async def version(request: Request) -> Response:
    """The version of outpace."""
    return JSONResponse({"version": outpace.__version__})


def _model(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "outpace",
        "root": served.llm.built.config.model,
        "parent": None,
        "max_model_len": served.max_model_len,
    }

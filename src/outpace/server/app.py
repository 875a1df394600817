"""The HTTP application over an engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import outpace
from outpace.async_llm import AsyncLLM
from outpace.server.chat import chat_completions
from outpace.server.completions import completions
from outpace.server.drafter import show_drafters, swap_drafter
from outpace.server.errors import add_error_handlers
from outpace.server.limits import KeyCheck
from outpace.server.metrics import add_metrics
from outpace.server.models import health, list_models, show_model, version
from outpace.server.page import show_page
from outpace.server.recording import Recorder
from outpace.server.served import serve_model
from outpace.server.settings import ServerSettings
from outpace.server.tokens import detokenize, tokenize

__all__ = ["create_app"]


def create_app(llm: AsyncLLM, settings: ServerSettings, recorder: Recorder | None = None) -> FastAPI:
    """The application; it neither starts nor closes the engine.

    `app.state` has `llm`, `settings` and `served`.

    Args:
        llm: the engine's front.
        settings: of the server.
        recorder: takes finished answers; None where none are recorded. It is not closed either.

    Raises:
        InvalidParameter: a parser of the settings is not known.
    """
    app = FastAPI(title="outpace", version=outpace.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.llm = llm
    app.state.settings = settings
    app.state.served = serve_model(llm, settings, recorder)
    add_error_handlers(app)
    app.add_api_route("/", show_page, methods=["GET", "HEAD"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", list_models, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models/{name:path}", show_model, methods=["GET", "HEAD"])
    app.add_api_route("/v1/drafter", show_drafters, methods=["GET", "HEAD"])
    app.add_api_route("/v1/drafter", swap_drafter, methods=["POST"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/version", version, methods=["GET", "HEAD"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
    add_metrics(app, llm, app.state.served.name, recorder)
    if settings.api_keys:
        app.add_middleware(KeyCheck, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app

"""What answers to generation requests have in common, and how they are run."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from outpace.async_llm import Prepared
from outpace.engine.outputs import Piece, RequestOutput
from outpace.errors import OutpaceError
from outpace.server.bodies import Pieces, as_json
from outpace.server.errors import CLIENT_GONE, ApiError, as_api_error
from outpace.server.limits import read_json
from outpace.server.reading import read_request
from outpace.server.requests import Body, GenerationRequest
from outpace.server.running import ClientGone, Run, unless_gone
from outpace.server.served import Served
from outpace.server.streaming import EventStream

__all__ = ["Envelope", "answer", "blame", "log_answers", "log_prompt", "pieces_of", "read", "served_by"]

R = TypeVar("R", bound=Body)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that all bodies of one answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, served: Served, prefix: str, request_id: str | None) -> Envelope:
        """A fresh one; ids begin with `prefix`."""
        number = request_id or secrets.token_hex(16)
        return cls(f"{prefix}-{number}", int(time.time()), served.name, served.fingerprint)

    def fields(self) -> dict[str, Any]:
        """For the constructor of a body."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def served_by(request: Request) -> Served:
    """What this application serves."""
    served = request.app.state.served
    assert isinstance(served, Served)
    return served


async def read(request: Request, kind: type[R]) -> R:
    """The body of a request, for a model that is served here.

    Raises:
        ApiError: it is not possible, or not for this model.
    """
    served = served_by(request)
    body = read_request(kind, await read_json(request, served.settings.max_body_bytes))
    served.check_name(body.model)
    return body


async def answer(
    request: Request,
    body: GenerationRequest,
    prepared: Sequence[Prepared],
    stream: Callable[[Run], AsyncGenerator[BaseModel, None]] | None,
    whole: Callable[[Sequence[RequestOutput]], BaseModel],
) -> Response:
    """Computes prepared requests and answers, at once or as they grow.

    Args:
        request: of the client; when it goes away, they are ended.
        body: of the request.
        prepared: one for each prompt.
        stream: the bodies of a stream; None to answer at once.
        whole: the body of an answer that is not streamed.

    Raises:
        OutpaceError: there is no room, or one of them failed before the answer began.
    """
    served = served_by(request)
    recorder = served.recorder if body.may_be_recorded else None
    run = Run(served.llm, prepared, None if recorder is None else recorder.record)
    await run.start()
    # From here on an error is part of the stream.
    if stream is not None:
        return EventStream(stream(run), run.close)
    try:
        outputs = await unless_gone(request, run.outputs())
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        await run.close()
    return Response(as_json(whole(outputs)), media_type="application/json")


def blame(error: OutpaceError, body: GenerationRequest, param: str) -> ApiError:
    """What a client is told when its request cannot be prepared.

    Args:
        error: what was raised.
        body: the request.
        param: the field to blame if the error names none.
    """
    found = as_api_error(error, body.names(), param)
    if found.param == "logprobs" and "top_logprobs" in body.names():
        found.param = "top_logprobs"
    if found.param is not None and found.param.startswith("structured_outputs") and body.response_format is not None:
        found.param = "response_format"
    return found


def pieces_of(pieces: Sequence[Piece]) -> Pieces:
    """Text and origin of every token."""
    return Pieces(pieces=[(piece.text, piece.source) for piece in pieces])


def log_prompt(served: Served, envelope: Envelope, prompt: Any) -> None:
    """Writes what was asked to the log, if the settings say so."""
    if served.settings.log_prompts:
        log.info("%s asks %r", envelope.id, prompt)


def log_answers(served: Served, envelope: Envelope, outputs: Sequence[RequestOutput]) -> None:
    """Writes what was answered to the log, if the settings say so."""
    if served.settings.log_prompts:
        log.info("%s gets %r", envelope.id, [choice.text for output in outputs for choice in output.outputs])

"""/v1/drafter: which drafters are loaded, and a better head in the place of one of them."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from outpace.config import SpeculativeConfig
from outpace.server.envelope import read, served_by
from outpace.server.errors import ApiError
from outpace.server.requests import Body
from outpace.server.served import Served

__all__ = ["SwapRequest", "show_drafters", "swap_drafter"]

_SHOWN = ("method", "model", "adapter", "exit_layer", "num_speculative_tokens")


class SwapRequest(Body):
    """Body of POST /v1/drafter."""

    _path: ClassVar[str] = "/v1/drafter"

    run: str = Field(description="folder of a run of `outpace train`, or of a head, as the server sees it")
    force: bool = Field(default=False, description="take it whatever its `result.json` says")


async def show_drafters(request: Request) -> Response:
    """The loaded drafters, the first being the default."""
    return JSONResponse(await _loaded(served_by(request)))


async def swap_drafter(request: Request) -> Response:
    """Puts a head in the place of the one of the same method; running requests go on with it.

    Raises:
        ApiError: the server takes none, or not this one.
    """
    served = served_by(request)
    if served.swapper is None:
        message = "this server takes no drafters while it runs: start it with --swap-drafters-from DIR"
        raise ApiError(403, message, code="not_enabled")
    body = await read(request, SwapRequest)
    settings, reason = await served.swapper.swap(body.run, force=body.force)
    return JSONResponse({**await _loaded(served), "swapped": _shown(settings), "reason": reason})


async def _loaded(served: Served) -> dict[str, Any]:
    memory = await served.llm.memory()
    drafters = [_shown(item) for item in served.llm.built.speculative]
    return {"object": "drafter", "drafters": drafters, "memory_bytes": memory["drafter"]}


def _shown(item: SpeculativeConfig) -> dict[str, Any]:
    return {name: value for name in _SHOWN if (value := getattr(item, name)) is not None}

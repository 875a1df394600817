"""Settings of the server itself, beside those of the engine. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the server does with requests before the engine sees them, and how it is reached.

    Args:
        host: address to bind.
        port: TCP port to bind; 0 takes a free one.
        api_keys: keys that requests may carry as bearer token; empty lets everybody in.
        served_model_names: names that requests may give as `model`; the first is what answers carry.
        allowed_origins: origins of browsers that may read answers (CORS); empty for none.
        max_waiting: most requests that wait for their first step; further ones get 429.
        max_body_bytes: largest body of a request, in bytes; larger ones get 413.
        log_prompts: write what is asked and answered to the log.
        chat_template: a template's text in place of the model's own; None for the model's own.
        seed: seed of requests that give none; None draws one for each.
        tool_call_parser: format of the model's tool calls; None recognises it by the chat template.
        reasoning_parser: format of the model's reasoning; None recognises it by the chat template.
        drain_seconds: how long running requests may go on after the signal to stop, in seconds.
        root_path: prefix under which a proxy shows the server.
        log_requests: one line in the log for every HTTP request.
        generation_config: "auto" takes sampling defaults from the model, "vllm" neutral ones.
        override_generation_config: {field of `SamplingDefaults`: value}, above either.
        record: folder to which finished answers are appended; None records nothing.
        record_max_bytes: most that its files take together, in bytes.
        swap_drafters_from: folder below which POST /v1/drafter takes new drafters; None takes none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 16 * 1024 * 1024
    log_prompts: bool = False
    chat_template: str | None = None
    seed: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    drain_seconds: float = 30.0
    root_path: str = ""
    log_requests: bool = False
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    record: str | None = None
    record_max_bytes: int = 10**9
    swap_drafters_from: str | None = None

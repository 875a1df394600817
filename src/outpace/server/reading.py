"""From the JSON object of a request to its body: every field is known, ignored or refused, and errors name it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from outpace.checks import shown
from outpace.server.errors import ApiError
from outpace.server.requests import Body, ChatRequest, CompletionRequest, GenerationRequest, sampling_names

__all__ = ["read_request"]

_IN_JSON = {
    "dict_type": "it must be an object",
    "model_type": "it must be an object",
    "list_type": "it must be an array",
    "string_type": "it must be a text",
    "bool_type": "it must be true or false",
    "int_type": "it must be an integer",
}
"""What pydantic says in Python's words: {kind of error: the same for people who write JSON}."""

R = TypeVar("R", bound=Body)


def read_request(body: type[R], given: Mapping[str, Any]) -> R:
    """Sorts the fields of a JSON object, and checks those that are the server's own.

    Raises:
        ApiError: 400, naming the field.
    """
    present = {name: value for name, value in given.items() if value is not None}
    sampled = sampling_names(body)
    own: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in present.items():
        if name in body.model_fields:
            own[name] = value
        elif name in sampled:
            sampling[name] = value
        elif name not in body._ignored:
            _refuse(body, name, value, sampled)
    try:
        request = body.model_validate(own)
    except ValidationError as error:
        raise _invalid(body, error) from None
    if isinstance(request, GenerationRequest):
        request._sampling = sampling
        request.check()
    return request


def _refuse(body: type[Body], name: str, value: Any, sampled: list[str]) -> None:
    """Raises ApiError for a field that is refused or not known, unless its value changes nothing."""
    refusal = body._refused.get(name)
    if refusal is not None:
        if refusal.is_neutral(value):
            return
        raise ApiError(400, f"{name}={shown(value)} is not possible: {refusal.reason}", param=name)
    known = [*body.model_fields, *sampled]
    close = get_close_matches(name, known, n=1)
    there = next((other._path for other in (ChatRequest, CompletionRequest) if name in other.model_fields), None)
    hint = f"did you mean {close[0]!r}?" if close else f"it belongs to {there}" if there else "leave it out"
    message = f"the field {shown(name)} is not known to {body._path}: {hint}"
    raise ApiError(400, message, param=name, code="unknown_parameter")


def _invalid(body: type[Body], error: ValidationError) -> ApiError:
    """The first thing that pydantic found, in our words."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing: {body._path} needs it", param=param, code="missing_parameter")
    if first["type"] == "extra_forbidden":
        owner = param.rpartition(".")[0] or "the body"
        return ApiError(400, f"{param} is not known: leave it out of {owner}", param=param, code="unknown_parameter")
    text = _IN_JSON.get(first["type"]) or first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{param}={shown(first['input'])} is not possible: {text}", param=param)

"""The messages of a conversation, from OpenAI's form to what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.checks import shown
from outpace.server.errors import ApiError

__all__ = ["normalised", "template_variables"]

_KEPT = ("name", "tool_call_id", "reasoning_content")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
_OWN = ("messages", "self", "tools", "conversations", "chat_template", "return_assistant_tokens_mask")
"""Names that rendering takes for itself."""


def normalised(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages with contents as text and arguments of calls as objects; keys that no template knows are left out.

    Args:
        messages: as they came.
        template: text of the chat template: where it has no role "developer", that is "system".

    Raises:
        ApiError: 400, naming the part that is not possible.
    """
    if not messages:
        raise ApiError(400, "messages is empty: send at least one message", param="messages")
    return [_message(f"messages[{index}]", message, template) for index, message in enumerate(messages)]


def template_variables(
    template: str, given: Mapping[str, Any] | None, for_some: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """What the chat template is rendered with, besides messages and tools.

    Args:
        template: its text.
        given: `chat_template_kwargs`; stands above the others.
        for_some: variables that only some templates read; refused with others. None is left out.
        own: what the endpoint says itself.

    Raises:
        ApiError: 400.
    """
    for name in given or {}:
        if name in _OWN:
            param = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{param} is not possible: rendering sets it itself", param=param)
    wanted = {name: value for name, value in for_some.items() if value is not None}
    for name, value in wanted.items():
        if name not in template:
            message = (
                f"{name}={shown(value)} is not possible: this model's chat template does not read it; leave it out"
            )
            raise ApiError(400, message, param=name)
    return {**own, **wanted, **(given or {})}


def _message(label: str, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _impossible(f"{label}.role", role, "a text, as 'user'")
    if role == "developer" and "developer" not in template:
        role = "system"
    if message.get("function_call") is not None:
        raise _impossible(f"{label}.function_call", message["function_call"], "left out: use tool_calls")
    found: dict[str, Any] = {"role": role, "content": _content(f"{label}.content", message.get("content"))}
    found |= {key: message[key] for key in _KEPT if message.get(key) is not None}
    if message.get("reasoning") is not None:
        found.setdefault("reasoning_content", message["reasoning"])
    for key in _KEPT:
        if not isinstance(found.get(key, ""), str):
            raise _impossible(f"{label}.{key}", found[key], "a text")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise _impossible(f"{label}.tool_calls", calls, "a list of calls")
        found["tool_calls"] = [_call(f"{label}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return found


def _content(label: str, content: Any) -> str:
    """Text; parts are joined line by line, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _impossible(label, content, "a text, or a list of text parts")
    return "\n".join(_part(f"{label}[{index}]", part) for index, part in enumerate(content))


def _part(label: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise _impossible(f"{label}.type", kind, "'text': this server reads text only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _impossible(f"{label}.{_TEXT_PARTS[kind]}", text, "a text")
    return text


def _call(label: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise _impossible(label, call, "a call of type 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _impossible(f"{label}.function", function, "an object with name and arguments")
    found = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(label, function)}}
    if isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def _arguments(label: str, function: Mapping[str, Any]) -> Any:
    """An object where it is one: templates write it as JSON themselves. What a model once garbled stays as it is."""
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise _impossible(f"{label}.function.arguments", arguments, "the text of a JSON object")
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _impossible(label: str, value: Any, valid: str) -> ApiError:
    return ApiError(400, f"{label}={shown(value)} is not possible: it must be {valid}", param=label)

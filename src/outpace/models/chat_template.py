"""Chat templates: from the messages of a conversation to text, in Jinja's sandbox.

What transformers does is the reference, so the text is the same to the last character; importing it for that takes more
than a second. A template comes with a model, so it is code of a stranger: it gets copies in JSON's own types, cannot
change or reach anything else, and stops by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["TemplateSyntaxError", "compile_template", "render_template"]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; templates read the first, few the second."""
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands where a message that is to go on ends. The space tells whether a template trims messages."""
_TEMPLATES_KEPT = 32


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
        template: in Jinja's language.
        messages: {"role": ..., "content": ...} each.
        tools: JSON schemas of functions, or functions with type hints and docstrings.
        add_generation_prompt: open the assistant's turn behind it.
        continue_final_message: end the text within the last message, so that it goes on.
        variables: further ones of the template.

    Raises:
        Exception: the template is a program, and may raise anything.
    """
    compiled = compile_template(template)
    conversation = [_with_reasoning(_plain(message)) for message in messages]
    ending = _mark_end(template, conversation) if continue_final_message else ""
    text = compiled.render(
        **{
            "documents": None,
            **_plain(variables),
            "messages": conversation,
            "tools": None if tools is None else [_plain(_schema(tool)) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return _up_to_mark(text, ending) if continue_final_message else text


@lru_cache(_TEMPLATES_KEPT)
def compile_template(template: str) -> Template:
    """A template that can be rendered.

    Raises:
        TemplateSyntaxError: it is none; has the line.
    """
    return _environment().from_string(template)


# What templates see.


def _plain(value: Any) -> Any:
    """The same in types of JSON, as copies: methods of other objects may do anything, and no sandbox knows them."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # of pydantic
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _schema(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return tool
    return importlib.import_module("transformers.utils.chat_template_utils").get_json_schema(tool)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under every name that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


# A message that goes on.


def _mark_end(template: str, conversation: list[dict[str, Any]]) -> str:
    """Puts the mark behind the last message, and returns its text.

    Raises:
        ValueError: it has none, or the template does not show it.
    """
    content = conversation[-1].get("content") if conversation else None
    if content is None or "content" not in template:
        raise ValueError("the last message has no content that the template shows, so there is nothing to continue")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _MARK
        return content
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("the last message has no part that is text, so there is nothing to continue")
    text: str = part["text"]
    part["text"] = text + _MARK
    return text


def _up_to_mark(text: str, ending: str) -> str:
    mark = _MARK.strip()
    if ending.strip() not in text or mark not in text:
        raise ValueError("the template does not show the last message as it is, so it cannot be continued")
    place = text.rindex(mark)
    trimmed = not text.startswith(_MARK, place)
    return text[:place].rstrip() if trimmed else text[:place]


# The sandbox.


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dictionaries(), namespace=_Namespace
    )
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; its text is shown as it is."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionaries:
    """`dict` for templates: the type itself would lead out of the sandbox."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates, without names that Python keeps for itself."""

    def __init__(*args: Any, **items: Any) -> None:  # `self` is a name that a template may give
        self, *given = args
        names = dict(*given, **items)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is not possible as a name in a namespace: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter writes &, < and > in a way that is meant for web pages.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

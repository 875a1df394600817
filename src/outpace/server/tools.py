"""Tools of a request: what the model is shown, what it must write, and how its calls are read.

Text in, deltas out: nothing here knows HTTP or the engine. The formats stand in `tool_formats/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.errors import InvalidParameter
from outpace.server.tool_formats.deltas import ContentDelta, Delta, ToolCall, ToolDelta, collect
from outpace.server.tool_formats.hermes import HermesParser, hermes_grammar
from outpace.server.tool_formats.llama3_json import Llama3JsonParser, llama3_json_grammar
from outpace.server.tool_formats.mistral import MistralParser, mistral_grammar
from outpace.server.tool_formats.parser import ToolParser
from outpace.server.tool_formats.qwen3_coder import Qwen3CoderParser
from outpace.server.tool_formats.qwen3_coder_grammar import qwen3_coder_grammar
from outpace.server.tool_requests import Tool, check_choice, check_tools
from outpace.structured import StructuredOutputs

__all__ = [
    "TOOL_FORMATS",
    "ContentDelta",
    "Delta",
    "Tool",
    "ToolCall",
    "ToolDelta",
    "ToolParser",
    "ToolPlan",
    "check_format",
    "check_tools",
    "collect",
    "detect_format",
    "make_parser",
    "plan_tools",
]


@dataclass(frozen=True, slots=True)
class _Format:
    parser: type[ToolParser]
    grammar: Callable[[Sequence[Tool], bool], str]


_FORMATS = {
    "hermes": _Format(HermesParser, hermes_grammar),
    "qwen3_coder": _Format(Qwen3CoderParser, qwen3_coder_grammar),
    "llama3_json": _Format(Llama3JsonParser, llama3_json_grammar),
    "mistral": _Format(MistralParser, mistral_grammar),
}
TOOL_FORMATS = tuple(_FORMATS)
"""Names of the formats, vLLM's names for `--tool-call-parser`."""


def check_format(name: str) -> str:
    """The name, if it is one.

    Raises:
        InvalidParameter: listing those there are.
    """
    if name not in _FORMATS:
        raise InvalidParameter(f"tool_call_parser={name!r} is not known: there are {', '.join(TOOL_FORMATS)}")
    return name


def detect_format(chat_template: str) -> str | None:
    """The format in which a model with this template writes calls; None if it shows none that is known."""
    if "<function=" in chat_template and "<parameter=" in chat_template:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    # GLM's calls stand between the same tags, but are no JSON
    if "<tool_call>" in chat_template and "<arg_key>" not in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or '{"name": function name, "parameters":' in chat_template:
        return "llama3_json"
    return None


def make_parser(name: str, tools: Sequence[Tool] = (), **options: Any) -> ToolParser:
    """A fresh parser of this format; `options` are those of `ToolParser`.

    Raises:
        InvalidParameter: there is no such format.
    """
    return _FORMATS[check_format(name)].parser(tools, **options)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools mean for its prompt, its sampling and the reading of its answers.

    Args:
        shown: the tools for the chat template, as they came; None for no tools.
        structured_outputs: the grammar of answers that must be calls; None where they may be anything.
        format: how calls are written; None where none are read.
        tools: what may be called.
        most_calls: calls beyond this many are left out of the answer; None for no limit.
    """

    shown: Sequence[Mapping[str, Any]] | None = None
    structured_outputs: StructuredOutputs | None = None
    format: str | None = None
    tools: Sequence[Tool] = field(default=())
    most_calls: int | None = None

    @property
    def reads_calls(self) -> bool:
        """Whether answers are read for calls. Special tokens must then be part of their text: markers may be such."""
        return self.format is not None

    def parser(self, *, whole: bool = False) -> ToolParser | None:
        """A fresh parser, one for each answer (choice); None if all its text is content.

        Args:
            whole: calls are given out when they are complete, else they are content: for answers that are not streamed.
        """
        if self.format is None:
            return None
        forced = self.structured_outputs is not None
        return make_parser(self.format, self.tools, whole=whole, forced=forced, most_calls=self.most_calls)


def plan_tools(
    tools: Any, tool_choice: Any = None, parallel_tool_calls: bool | None = None, *, format_name: str | None
) -> ToolPlan:
    """Makes a plan of `tools`, `tool_choice` and `parallel_tool_calls` as they come in a request.

    "none" shows no tools and reads no calls; "auto" reads calls where the model writes some; "required" and a named
    tool prescribe the whole answer, with arguments that the tools' schemas allow.

    Args:
        tools: a list of tools as OpenAI writes them, or None.
        tool_choice: "none", "auto", "required", a named tool, or None for "auto" if there are tools.
        parallel_tool_calls: False gives out at most one call; None is True.
        format_name: how the model writes calls; None if it is not known.

    Raises:
        InvalidParameter: a field is not what it must be, or calls cannot be read or prescribed.
    """
    checked = check_tools(tools)
    choice = check_choice(tool_choice, checked)
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise InvalidParameter(f"parallel_tool_calls={parallel_tool_calls!r} is not possible: it must be true or false")
    if choice == "none":
        return ToolPlan()
    if format_name is None:
        raise InvalidParameter(
            "tools are not possible: the model's chat template shows no format of tool calls that is known; send none, "
            f"or start the server with --tool-call-parser and one of {', '.join(TOOL_FORMATS)}"
        )
    check_format(format_name)
    most_calls = 1 if parallel_tool_calls is False or isinstance(choice, Tool) else None
    structure = None
    if choice != "auto":
        possible = [choice] if isinstance(choice, Tool) else checked
        structure = StructuredOutputs(grammar=_FORMATS[format_name].grammar(possible, most_calls is None))
    return ToolPlan(list(tools), structure, format_name, checked, most_calls)

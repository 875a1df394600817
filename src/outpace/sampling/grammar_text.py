"""From what a request asks for to a grammar in llguidance's notation."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from outpace.errors import InvalidParameter
from outpace.sampling.gbnf import gbnf_as_lark, looks_like_gbnf
from outpace.sampling.grammar_beginning import parser_limits
from outpace.sampling.grammar_size import check_lark_size, check_size
from outpace.structured import StructuredOutputs

__all__ = ["explained", "first_useful_line", "grammar_text", "impossible"]

# Between two parts of a JSON text: a space, or a new line with its indentation. Without a limit a model may go on
# writing blanks until its tokens run out.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n( {0,40}|\t{0,10})",
    "lenient": False,
}
_SIGNIFICANT = re.compile(r"[\\.+*?()|\[\]{}^$]")
_RULE_OPTIONS = re.compile(r"^\s*[?!]?\w+(?:\.-?\d+)?\s*\[(.*)\]\s*:", re.MULTILINE)
_REFUSED_OPTIONS = re.compile(r"\b(max_tokens|temperature|stop_capture|stop)\b")
_LONGEST_SHOWN = 200
_LONGEST_REASON = 400
_TOO_DEEP = "it is nested too deeply: at most 127 levels are read; name parts in $defs and use $ref"
_REASONS = (
    (re.compile(r"oneOf constraints"), "oneOf is supported only where its parts exclude each other; use anyOf"),
    (re.compile(r"(Unimplemented keys.*)"), r"\1; leave them out"),
    (re.compile(r"recursion limit exceeded"), _TOO_DEEP),
    (
        re.compile(r".*Current row has \d+ items; max is (\d+).*"),
        r"more than \1 parts of it are open at one place: use fewer optional properties or alternatives, and rules "
        'that can be read in one way only, such as x: "a"+ for x: x x | "a"',
    ),
    (
        re.compile(r".*(?:too many expressions|too many states|[Tt]oo many items|fuel exhausted|too big).*"),
        "too many ways to go on are open at one place: use smaller counts in {...}, fewer alternatives, and parts that "
        "differ in how they begin",
    ),
)


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar, as text for `LLMatcher`; equal texts are equal grammars. Whether it is one, `LLMatcher` finds out.

    Raises:
        InvalidParameter: it is too large or too deep, GBNF that cannot be read, or a Lark grammar with what outpace
            does not do.
    """
    try:
        check_size(wanted)
        return _grammar_text(wanted)
    except RecursionError:
        raise impossible(wanted, _TOO_DEEP) from None
    except ValueError as error:
        raise impossible(wanted, first_useful_line(str(error))) from error


def _grammar_text(wanted: StructuredOutputs) -> str:
    if wanted.json is not None:
        return _json_grammar(wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json))
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # one expression: where a choice begins another, both stay open until the text has decided
        return LLMatcher.grammar_from_regex("|".join(_SIGNIFICANT.sub(r"\\\g<0>", item) for item in wanted.choice))
    return _free_grammar(wanted.grammar or "")


def _json_grammar(schema: str) -> str:
    if schema.strip() in ("true", "false"):  # options need an object to stand in
        schema = f'{{"allOf": [{schema}]}}'
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def _free_grammar(lark: str) -> str:
    if looks_like_gbnf(lark):
        lark = gbnf_as_lark(lark)
    check_lark_size(lark)
    for options in _RULE_OPTIONS.findall(lark):
        refused = _REFUSED_OPTIONS.search(options)
        if refused:
            raise ValueError(f"a rule's {refused.group()} is not supported: leave it out")
    grammar = LLMatcher.grammar_from_lark(lark)
    # without a tokenizer it warns of what only a tokenizer can resolve: special tokens, and tokens by their ids
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits(free=True))
    if any(message.startswith("no tokenizer") for message in messages):
        raise ValueError("tokens in <...> are not supported: rules are made of text alone")
    return grammar


def impossible(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """The error that says what was asked for and why it cannot be."""
    return InvalidParameter(f"structured_outputs with {_shown(wanted)} is not possible: {explained(reason)}")


def explained(reason: str) -> str:
    """llguidance's reason, with what would work where that is known."""
    for known, explanation in _REASONS:
        if found := known.match(reason):
            return found.expand(explanation)
    return reason


def first_useful_line(message: str) -> str:
    """What of llguidance's message, which may go on for pages, says what is wrong."""
    lines = message.strip().splitlines() or ["no reason is given"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return (reason or lines[0])[:_LONGEST_REASON]


def _shown(wanted: StructuredOutputs) -> str:
    if wanted.json_object:
        return "json_object"
    name = next(name for name in ("json", "regex", "choice", "grammar") if getattr(wanted, name) is not None)
    value = getattr(wanted, name)
    try:
        text = repr(value)
    except RecursionError:
        text = "(too deep to show)"
    return f"{name}={text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}"

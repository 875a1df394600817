"""From what a request asks for to a grammar in llguidance's notation."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from outpace.errors import InvalidParameter
from outpace.sampling.gbnf import gbnf_as_lark, looks_like_gbnf
from outpace.structured import StructuredOutputs

__all__ = ["first_useful_line", "grammar_text", "impossible"]

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


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar, as text for `LLMatcher`; equal texts are equal grammars. Whether it is one, `LLMatcher` finds out.

    Raises:
        InvalidParameter: GBNF that cannot be read, or a Lark grammar with what outpace does not do.
    """
    if wanted.json is not None:
        return _json_grammar(wanted, wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json))
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # one expression: where a choice begins another, both stay open until the text has decided
        return LLMatcher.grammar_from_regex("|".join(_SIGNIFICANT.sub(r"\\\g<0>", item) for item in wanted.choice))
    return _free_grammar(wanted, wanted.grammar or "")


def _json_grammar(wanted: StructuredOutputs, schema: str) -> str:
    if schema.strip() in ("true", "false"):  # options need an object to stand in
        schema = f'{{"allOf": [{schema}]}}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise impossible(wanted, first_useful_line(str(error))) from error


def _free_grammar(wanted: StructuredOutputs, lark: str) -> str:
    if looks_like_gbnf(lark):
        try:
            lark = gbnf_as_lark(lark)
        except ValueError as error:
            raise impossible(wanted, first_useful_line(str(error))) from error
    for options in _RULE_OPTIONS.findall(lark):
        refused = _REFUSED_OPTIONS.search(options)
        if refused:
            raise impossible(wanted, f"a rule's {refused.group()} is not supported: leave it out")
    grammar = LLMatcher.grammar_from_lark(lark)
    # without a tokenizer it warns of what only a tokenizer can resolve: special tokens, and tokens by their ids
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if any(message.startswith("no tokenizer") for message in messages):
        raise impossible(wanted, "tokens in <...> are not supported: rules are made of text alone")
    return grammar


def impossible(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """The error that says what was asked for and why it cannot be."""
    if reason.startswith("oneOf constraints"):
        reason = "oneOf is supported only where its parts exclude each other; use anyOf"
    elif reason.startswith("Unimplemented keys"):
        reason += "; leave them out"
    return InvalidParameter(f"structured_outputs with {_shown(wanted)} is not possible: {reason}")


def first_useful_line(message: str) -> str:
    """What of llguidance's message, which may go on for pages, says what is wrong."""
    lines = message.strip().splitlines() or ["no reason is given"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return (reason or lines[0])[:_LONGEST_REASON]


def _shown(wanted: StructuredOutputs) -> str:
    if wanted.json_object:
        return "json_object"
    name = next(name for name in ("json", "regex", "choice", "grammar") if getattr(wanted, name) is not None)
    text = repr(getattr(wanted, name))
    return f"{name}={text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}"

"""Tools of a request are checked by name, and forced calls can be nothing but calls that the schemas allow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from outpace.errors import InvalidParameter
from outpace.sampling.grammar import GrammarCompiler
from outpace.server.response_format import response_structure
from outpace.server.tools import TOOL_FORMATS, ToolPlan, check_tools, collect, plan_tools
from outpace.structured import StructuredOutputs
from tests.models.tiny_tokenizers import byte_level
from tests.sampling.grammars import random_token, tiny
from tests.server.tool_texts import CLOCK, WEATHER, call_text


def _function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def _parameters(schema: Any) -> dict[str, Any]:
    return _function(parameters=schema)


WRONG_TOOLS = [
    ("text", "tools='text'"),
    ({}, "tools={}"),
    (["f"], r"tools\[0\]='f'"),
    ([CLOCK, {"function": {"name": "f"}}], r"tools\[1\].type=None .* 'function'"),
    ([{"type": "retrieval"}], r"tools\[0\].type='retrieval'"),
    ([{"type": "function"}], r"tools\[0\].function=None"),
    ([_function(name="a b")], r"tools\[0\].function.name='a b' .* 1 to 64 of"),
    ([_function(name="x" * 65)], r"tools\[0\].function.name='xxx"),
    ([_function(name="f\n")], r"tools\[0\].function.name="),
    ([_function(name=None)], r"tools\[0\].function.name=None"),
    ([CLOCK, WEATHER, CLOCK], r"tools\[2\].function.name='clock' is the name of tools\[0\].function.name too"),
    ([_function(description=3)], r"tools\[0\].function.description=3"),
    ([_function(strict="yes")], r"tools\[0\].function.strict='yes'"),
    ([_parameters([])], r"tools\[0\].function.parameters=\[\]"),
    ([_parameters({"type": "array"})], r"tools\[0\].function.parameters.type='array' .* 'object'"),
    ([_parameters({"properties": []})], r"tools\[0\].function.parameters.properties=\[\]"),
    ([_parameters({"properties": {"a": 3}})], r"tools\[0\].function.parameters.properties.a=3"),
    ([_parameters({"required": "a"})], r"tools\[0\].function.parameters.required='a'"),
]


@pytest.mark.parametrize(("tools", "message"), WRONG_TOOLS)
def test_wrong_tools_are_refused_by_name(tools: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        check_tools(tools)


WRONG_CHOICES = [
    ("must", [CLOCK], "tool_choice='must' .* 'required'"),
    (3, [CLOCK], "tool_choice=3"),
    ("required", [], "tool_choice='required' .* without tools"),
    ({"type": "tool"}, [CLOCK], "tool_choice.type='tool'"),
    ({"type": "function", "function": {"name": "x"}}, [CLOCK], "tool_choice.function.name='x' .* it has 'clock'"),
    ({"type": "function"}, [CLOCK], "tool_choice.function.name=None"),
    ({"type": "function", "function": {"name": "x"}}, None, "tool_choice.function.name='x' .* no tools"),
]


@pytest.mark.parametrize(("choice", "tools", "message"), WRONG_CHOICES)
def test_wrong_choices_are_refused_by_name(choice: Any, tools: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        plan_tools(tools, choice, format_name="hermes")


def test_other_refusals() -> None:
    with pytest.raises(InvalidParameter, match="parallel_tool_calls=1"):
        plan_tools([CLOCK], None, 1, format_name="hermes")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="--tool-call-parser and one of hermes"):
        plan_tools([CLOCK], format_name=None)
    with pytest.raises(InvalidParameter, match="tool_call_parser='x'"):
        plan_tools([CLOCK], format_name="x")
    assert plan_tools([CLOCK], "none", format_name=None) == ToolPlan()


def test_what_the_choices_mean() -> None:
    for choice in (None, "none", "auto"):
        assert plan_tools(None, choice, format_name="hermes") == ToolPlan()
    assert plan_tools([CLOCK], "none", format_name="hermes") == ToolPlan()
    assert ToolPlan().parser() is None and not ToolPlan().reads_calls
    for choice in (None, "auto"):
        plan = plan_tools([CLOCK, WEATHER], choice, format_name="hermes")
        assert plan.shown == [CLOCK, WEATHER] and plan.structured_outputs is None and plan.reads_calls
        assert plan.parser() is not plan.parser()
    assert plan.most_calls is None
    assert plan_tools([CLOCK], "auto", False, format_name="hermes").most_calls == 1
    named = plan_tools([CLOCK], {"type": "function", "function": {"name": "clock"}}, format_name="hermes")
    assert named.most_calls == 1 and named.structured_outputs is not None


def _weather_fits(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.pop("city"), str)
        and 1 <= value.pop("days", 1) <= 14
        and value.pop("unit", "celsius") in ("celsius", "fahrenheit")
        and isinstance(value.pop("note", None), (str, type(None)))
        and isinstance(value.pop("where", {"lat": 0})["lat"], (int, float))
        and value == {}
    )


TIGHT = _function(
    name="tight",
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[a-c]{2}$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 3},
            "kind": {"type": "string", "enum": ["a\nb", 'say "x"', "é😀"]},
            "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
            "flag": {"$ref": "#/$defs/flag"},
        },
        "required": ["code", "short", "kind", "list", "flag"],
        "$defs": {"flag": {"type": "boolean"}},
    },
)


def _tight_fits(value: dict[str, Any]) -> bool:
    return (
        list(value) == ["code", "short", "kind", "list", "flag"]
        and value["code"] in [a + b for a in "abc" for b in "abc"]
        and 1 <= len(value["short"]) <= 3
        and value["kind"] in ("a\nb", 'say "x"', "é😀")
        and len(value["list"]) <= 2
        and all(isinstance(item, bool) for item in [*value["list"], value["flag"]])
    )


FITS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "get_weather": _weather_fits,
    "clock": lambda value: value == {},
    "tight": _tight_fits,
}


def _random_answers(plan: ToolPlan, count: int) -> list[str]:
    """Random walks through the grammar that reached an end within 3000 tokens.

    Bare text ends with a tag, which no walk meets by chance: it is tried every few tokens.
    """
    tokenizer, compiler, _, eos = tiny("byte-level")
    assert plan.structured_outputs is not None
    tag = tokenizer.encode("\n</parameter>")
    texts: list[str] = []
    for seed in range(count):
        source, grammar, tokens = random.Random(seed), compiler.compile(plan.structured_outputs), [-1]
        while len(tokens) < 3000 and tokens[-1] not in eos:
            step = [random_token(grammar, eos, source, end=0.5)]
            if source.random() < 0.2 and grammar.count_legal(tag) == len(tag):
                step = tag
            assert all(map(grammar.consume, step))
            tokens += step
        if tokens[-1] in eos:
            texts.append(tokenizer.decode(tokens[1:-1]))
    return texts


def _calls(plan: ToolPlan, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of an answer that consists of calls alone; read whole, and in single characters as it grows."""
    readings = []
    for whole in (True, False):
        parser = plan.parser(whole=whole)
        assert parser is not None
        deltas = [delta for piece in ([text] if whole else text) for delta in parser.push(piece)] + parser.finish()
        content, calls = collect(deltas)
        assert content == ""
        readings.append([(call.name, json.loads(call.arguments)) for call in calls])
    assert readings[0] == readings[1]
    return readings[0]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_answers_are_calls_that_the_schemas_allow(name: str) -> None:
    plan = plan_tools([WEATHER, CLOCK, TIGHT], "required", format_name=name)
    answers = [_calls(plan, text) for text in _random_answers(plan, 24)]
    assert len(answers) >= 12 and all(answers)
    called = [call for calls in answers for call in calls]
    assert len(called) > len(answers)
    assert {tool for tool, _ in called} == set(FITS)
    assert [(tool, value) for tool, value in called if not FITS[tool](dict(value))] == []


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_named_tool_is_called_once(name: str) -> None:
    choice = {"type": "function", "function": {"name": "tight"}}
    plan = plan_tools([WEATHER, TIGHT], choice, format_name=name)
    single = plan_tools([WEATHER, TIGHT], "required", False, format_name=name)
    for answers, names in (
        (_random_answers(plan, 6), {"tight"}),
        (_random_answers(single, 12), {"tight", "get_weather"}),
    ):
        calls = [_calls(plan, text) for text in answers]
        assert len(calls) >= 4 and {len(item) for item in calls} == {1}
        assert {item[0][0] for item in calls} == names


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_answers_look_like_those_of_the_templates(name: str) -> None:
    """What a model was shown as a call is a text of the grammar, so it is not made to write what it never saw."""
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": 'A "quoted"\nplace', "days": 3}), ("clock", {})]
    text = call_text(name, calls, ensure_ascii=False).removeprefix("[TOOL_CALLS]")
    plan = plan_tools([WEATHER, CLOCK], "required", format_name=name)
    tokenizer, compiler, _, _ = tiny("byte-level")
    assert plan.structured_outputs is not None
    grammar = compiler.compile(plan.structured_outputs)
    assert all(grammar.consume(token) for token in _canonical(compiler, plan.structured_outputs, text))
    assert grammar.mask()[tokenizer.vocab["</s>"]]
    assert _calls(plan, text) == calls


def _canonical(compiler: GrammarCompiler, wanted: StructuredOutputs, text: str) -> list[int]:
    """Tokens of the text such as a grammar takes them: where one text must follow, as the tokenizer writes that."""
    backend = byte_level()
    grammar, tokens, rest = compiler.compile(wanted), [], text
    while rest:
        options = grammar.forced(1) or backend.encode(rest, add_special_tokens=False).ids[:1]
        if not grammar.consume(options[0]):
            options = backend.encode(rest[0], add_special_tokens=False).ids[:1]
            assert grammar.consume(options[0]), rest
        tokens += options
        rest = text[len(backend.decode(tokens, skip_special_tokens=False)) :]
    return tokens


UNPRESCRIBABLE = [
    ("hermes", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ("mistral", {"properties": {"a": {"$ref": "#/$defs/none"}}}, "cannot be prescribed"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "("}}}, "cannot be prescribed"),
    ("qwen3_coder", {"properties": {}, "minProperties": 2}, "have minProperties"),
    ("qwen3_coder", {"anyOf": [{"required": ["a"]}]}, "have anyOf"),
    ("qwen3_coder", {"properties": {"a>": {}}}, "a parameter 'a>'"),
]


@pytest.mark.parametrize(("name", "schema", "message"), UNPRESCRIBABLE)
def test_schemas_that_no_grammar_can_follow_are_refused_when_forced(name: str, schema: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"the tool 'f'.*{message}"):
        plan_tools([_parameters(schema)], "required", format_name=name)
    assert plan_tools([_parameters(schema)], "auto", format_name=name).structured_outputs is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_tool_without_a_schema_for_its_arguments(name: str) -> None:
    """No parameters are none; an object of which nothing is said may have any, where the format can prescribe that."""
    none = plan_tools([_function()], "required", False, format_name=name)
    assert {json.dumps(_calls(none, text)) for text in _random_answers(none, 4)} == {'[["f", {}]]'}
    free = plan_tools([_parameters({"type": "object"})], "required", False, format_name=name)
    found = {json.dumps(_calls(free, text)) for text in _random_answers(free, 10)}
    assert (len(found) > 1) == (name != "qwen3_coder")


RESPONSE_FORMATS = [
    (None, None),
    ({"type": "text"}, None),
    ({"type": "json_object"}, StructuredOutputs(json_object=True)),
    (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
        StructuredOutputs(json={"type": "integer"}),
    ),
]


@pytest.mark.parametrize(("given", "wanted"), RESPONSE_FORMATS)
def test_response_formats(given: Any, wanted: StructuredOutputs | None) -> None:
    assert response_structure(given) == wanted


def _schema(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, **changes}}


WRONG_FORMATS = [
    ("json", "response_format='json'"),
    ({}, "response_format.type=None .* text, json_object, json_schema"),
    ({"type": "structural_tag"}, "response_format.type='structural_tag'"),
    ({"type": ["text"]}, "response_format.type="),
    ({"type": "json_schema"}, "response_format.json_schema=None"),
    (_schema(name=None), "response_format.json_schema.name=None"),
    (_schema(name="a b"), "response_format.json_schema.name='a b'"),
    (_schema(schema=None), "response_format.json_schema.schema=None"),
    (_schema(schema="{}"), "response_format.json_schema.schema='{}'"),
    (_schema(schema={"const": float("nan")}), "response_format.json_schema.schema is not possible"),
    (_schema(strict=1), "response_format.json_schema.strict=1"),
    (_schema(description=1), "response_format.json_schema.description=1"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_FORMATS)
def test_wrong_response_formats_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        response_structure(given)

"""Calls are read the same however the answer comes, and what is no call is content to the last character."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import InvalidParameter
from outpace.server.tools import (
    TOOL_FORMATS,
    ContentDelta,
    ToolDelta,
    collect,
    detect_format,
    make_parser,
)
from tests.server.tool_texts import TOOLS, call_text, check_order, outcome, read

PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
LLAMA_CALL = f'{{"name": "get_weather", "parameters": {PARIS}}}'
WEATHER_CALL = ("get_weather", PARIS)

WELL_FORMED = [
    ("hermes", "No tools needed.", "No tools needed.", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER_CALL]),
    ("hermes", f"I look.\n\n<tool_call>{CALL}</tool_call>\n\nDone.", "I look.\n\nDone.", [WEATHER_CALL]),
    ("hermes", f"\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", [WEATHER_CALL] * 2),
    ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", "", [WEATHER_CALL] * 2),
    ("hermes", f"<tool_call>{CALL}}}\n</tool_call>", "", [WEATHER_CALL]),
    ("hermes", f"<tool_call>{CALL[:-1]}\n</tool_call>", "", [WEATHER_CALL]),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', "", [WEATHER_CALL]),
    ("hermes", f'<tool_call>{{"name": "x", "arguments": {json.dumps(PARIS)}}}</tool_call>', "", [("x", PARIS)]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "", [("clock", "{}")]),
    ("hermes", '<tool_call>{"id": 7, "name": "clock", "arguments": {}, "x": [0]}</tool_call>', "", [("clock", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}]</tool_call>\\"<tool_call>{", "b": [[-0.5e-3]]}}</tool_call>',
        "",
        [("f", '{"a": "}]</tool_call>\\"<tool_call>{", "b": [[-0.5e-3]]}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2 é 😀 \\u00e9"}}</tool_call>',
        "",
        [("f", '{"a": "1\\n\\t2 é 😀 \\u00e9"}')],
    ),
    ("llama3_json", LLAMA_CALL, "", [WEATHER_CALL]),
    ("llama3_json", f"\n{LLAMA_CALL};{LLAMA_CALL} ; {LLAMA_CALL}\n", "", [WEATHER_CALL] * 3),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL}\n{LLAMA_CALL}", "", [WEATHER_CALL] * 2),
    ("llama3_json", f"I look. <|python_tag|>{CALL}", "I look.", [WEATHER_CALL]),
    ("llama3_json", f'{{"type": "function", {LLAMA_CALL[1:]} Done', " Done", [WEATHER_CALL]),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", [WEATHER_CALL]),
    ("mistral", f"I look. [TOOL_CALLS] [{CALL}, {CALL}]", "I look.", [WEATHER_CALL] * 2),
    ("mistral", f"[TOOL_CALLS]{CALL}", "", [WEATHER_CALL]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]clock{{}}", "", [WEATHER_CALL, ("clock", "{}")]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", [WEATHER_CALL]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]aB3456789[ARGS]{PARIS}", "", [WEATHER_CALL]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]}[TOOL_CALLS]"}}]',
        "",
        [("f", '{"a": "]}[TOOL_CALLS]"}')],
    ),
    (
        "qwen3_coder",
        "Look\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "Look",
        [WEATHER_CALL],
    ),
    ("qwen3_coder", "<function=get_weather><parameter=city>Paris</parameter></function>", "", [WEATHER_CALL]),
    ("qwen3_coder", "<tool_call><function=clock></function></tool_call>!", "!", [("clock", "{}")]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
@pytest.mark.parametrize("whole", [False, True])
def test_calls_are_read(name: str, text: str, content: str, calls: list[tuple[str, str]], whole: bool) -> None:
    assert outcome(name, text, whole=whole) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


MALFORMED = [
    ("hermes", "a < b, <tool, <tool_call"),
    ("hermes", " <tool_call>nothing</tool_call> "),
    ("hermes", "<tool_call>\n{}\n</tool_call>"),
    ("hermes", f"<tool_call>[{CALL}]</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'city\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "not json"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "arguments": {}, "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"'),
    ("hermes", '<tool_call>{"name" "f"}</tool_call>'),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 7}}'),
    ("llama3_json", '{"name": "get_weather"}'),
    ("llama3_json", '{"name": "get_weather", "age": 7}'),
    ("llama3_json", '{"answer": [1, 2]}; {"a": 3}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", f"The JSON is {LLAMA_CALL}"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] get_weather 5 times"),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]x{}"),
    ("mistral", "list[0] [TOOL_ [TOOL_CALLS"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>"),
    ("qwen3_coder", "<function=>x</function>"),
    ("qwen3_coder", "<function=f\n>"),
    ("qwen3_coder", "<function=f><parameter=></parameter></function>"),
    ("qwen3_coder", f"<tool_call>{CALL}</tool_call>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_no_call_is_content(name: str, text: str, whole: bool) -> None:
    assert outcome(name, text, whole=whole) == (text, [])


BROKEN_OFF = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, b', '{"a": 1, ', "b"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Par', '{"a": "Par', ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', None, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}} </tool_call>', '{"a": 0', "1}} </tool_call>"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter>?", '{"a": 1', "?"),
    ("qwen3_coder", "<function=get_weather><parameter=city>a</param", '{"city": "a', ""),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>2", '{"a": 1', "2"),
]


@pytest.mark.parametrize(("name", "text", "arguments", "content"), BROKEN_OFF)
def test_a_call_that_breaks_off_late_is_not_completed(
    name: str, text: str, arguments: str | None, content: str
) -> None:
    """Streamed, what was given out stays; as a whole, it is content."""
    found, calls = outcome(name, text)
    if arguments is None:
        assert (found, calls) == (text, [])
    else:
        assert found == content and [call[1] for call in calls] == [arguments]
    assert outcome(name, text, whole=True) == (text, [])


def test_arguments_grow() -> None:
    """Name and id come once, when the first value begins; from then on nothing is held back."""
    text = '{"name": "f", "arguments": {"city": "Paris", "days": 3}}'
    deltas = read("hermes", ["Hi <tool_call>", *text, "</tool_call>"])
    assert deltas[0] == ContentDelta("Hi")
    assert deltas[1] == ToolDelta(0, "0", "f", '{"city": "')
    assert [delta.arguments for delta in deltas[2:] if isinstance(delta, ToolDelta)] == list('Paris", "days": 3}')
    values = read("qwen3_coder", list("<function=get_weather><parameter=city>\nParis\n</parameter></function>"))
    assert [delta.arguments for delta in values if isinstance(delta, ToolDelta)] == [
        '{"city": "',
        *"Paris",
        '"',
        "}",
    ]


def test_content_is_not_held_back() -> None:
    parser = make_parser("hermes", TOOLS)
    assert [parser.push(piece) for piece in ("Hello", " ", "wor", "<to", "ld")] == [
        [ContentDelta("Hello")],
        [],
        [ContentDelta(" wor")],
        [],
        [ContentDelta("<told")],
    ]
    assert parser.finish() == []
    with pytest.raises(ValueError, match="finished"):
        parser.push("more")


TYPED = [
    ("days", "3", 3),
    ("days", "three", "three"),
    ("city", "3", "3"),
    ("city", "null", "null"),
    ("city", 'say "</p>" \\ \n\n new\n', 'say "</p>" \\ \n\n new\n'),
    ("city", "", ""),
    ("unit", "celsius", "celsius"),
    ("note", "None", None),
    ("note", "12", "12"),
    ("note", "plain", "plain"),
    ("where", '{"lat": 1.5}', {"lat": 1.5}),
    ("unknown", "True", True),
    ("unknown", "NaN", "NaN"),
    ("unknown", "[1, 2", "[1, 2"),
]


@pytest.mark.parametrize(("key", "written", "value"), TYPED)
def test_bare_values_get_the_type_of_the_schema(key: str, written: str, value: object) -> None:
    text = f"<function=get_weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>"
    ((_, arguments),) = outcome("qwen3_coder", text)[1]
    assert json.loads(arguments) == {key: value}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=f>", "</function>", "{", '"', "\n"]
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON | st.sampled_from(MARKS), max_size=4)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@settings(max_examples=40)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), escaped=st.booleans(), indent=st.sampled_from([None, 2]))
def test_any_arguments_arrive(name: str, arguments: list[dict[str, object]], escaped: bool, indent: int | None) -> None:
    text = call_text(name, [("clock", item) for item in arguments], ensure_ascii=escaped, indent=indent)
    content, calls = outcome(name, text)
    assert content == "" and [json.loads(call[1]) for call in calls] == arguments
    assert outcome(name, text, whole=True) == (content, calls)


FRAGMENTS = st.sampled_from(
    [
        *MARKS,
        *(
            "<tool_",
            "</tool_call",
            "[ARGS]",
            "[CALL_ID]",
            ";",
            ",",
            "]",
            "[",
            "}",
            " ",
            ":",
            "\\",
            "tru",
            "-1",
            "é😀",
            "a",
        ),
        *(
            '"name": "clock", ',
            '"arguments": {',
            '"parameters": {"a": 1',
            '{"name": "clock", "arguments": {}}',
            "clock{}",
        ),
        *('{"name": "clock", "parameters": {"b": "', "<parameter=a>", "</parameter>", "<function=get_weather>"),
        *("<parameter=city>x", '\\ud800"', "}}", '"arguments": "{}"'),
    ]
)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=80)
@given(fragments=st.lists(FRAGMENTS, max_size=14), forced=st.booleans(), data=st.data())
def test_cuts_change_nothing(name: str, whole: bool, fragments: list[str], forced: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = read(name, pieces, whole=whole, forced=forced)
    check_order(deltas)
    content, calls = collect(deltas)
    at_once = read(name, [text], whole=whole, forced=forced)
    assert (content, calls) == collect(at_once) == collect(read(name, list(text), whole=whole, forced=forced))
    joined = make_parser(name, TOOLS, whole=whole, forced=forced).push(text)
    for delta, following in pairwise(joined):
        assert not (isinstance(delta, ContentDelta) and isinstance(following, ContentDelta))
    if not calls:
        assert content == text
    if whole:
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


class _CountingReader:
    def __init__(self, reader: Generator[None, str, None]) -> None:
        self._reader = reader
        self.taken = 0

    def send(self, character: str) -> None:
        self.taken += 1
        self._reader.send(character)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_hostile_answers_take_linear_work(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted in characters that the reader takes, those read again included."""
    opened = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
        "llama3_json": '<|python_tag|>{"name": "clock", "parameters": {"a": "',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "',
        "qwen3_coder": "<tool_call><function=get_weather><parameter=city>",
    }[name]
    for text in (opened * 200, "[" * 5000, '{"a":' * 2000, "<tool_call>" * 1000, opened + '{"[' * 3000):
        parser = make_parser(name, TOOLS, whole=whole)
        reader = _CountingReader(parser._reader)
        monkeypatch.setattr(parser, "_reader", reader)
        parser.push(text)
        parser.finish()
        assert len(text) < reader.taken < 4 * len(text)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_ids_are_new_and_of_the_right_form(name: str) -> None:
    text = call_text(name, [("clock", {})] * 20)
    _, calls = collect([*(parser := make_parser(name, TOOLS)).push(text), *parser.finish()])
    form = r"[a-zA-Z0-9]{9}" if name == "mistral" else r"call_[a-zA-Z0-9]{24}"
    assert len({call.id for call in calls}) == 20 and all(re.fullmatch(form, call.id) for call in calls)


def test_calls_beyond_the_most_are_left_out() -> None:
    for name in TOOL_FORMATS:
        for whole in (False, True):
            text = call_text(name, [("clock", {"a": 1}), ("clock", {"a": 2})])
            assert outcome(name, text, most_calls=1, whole=whole) == ("", [("clock", '{"a": 1}')])


TEMPLATES = {
    "hermes": '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=a>\\nvalue_1\\n</parameter>\\n</function>",
    "mistral": "{{- '[TOOL_CALLS][' }}{% for tool_call in message.tool_calls %}",
    "llama3_json": "{{- '<|python_tag|>' + tool_call.name + '.call(' }}",
    None: "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key> {{ tc.arguments }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_recognised_by_the_template(name: str | None) -> None:
    assert detect_format(TEMPLATES[name]) == name
    assert detect_format("{% for message in messages %}{{ message.content }}{% endfor %}") is None


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        InvalidParameter, match=r"tool_call_parser='pythonic' .* hermes, qwen3_coder, llama3_json, mistral"
    ):
        make_parser("pythonic")


def test_neither_torch_nor_a_web_framework_is_needed() -> None:
    code = "import sys, outpace.server.tools, outpace.server.reasoning, outpace.server.response_format; "
    code += "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

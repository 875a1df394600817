"""Chat templates: the same text as transformers' own renderer, and nothing outside of the sandbox."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from outpace.models.chat_template import TemplateSyntaxError, compile_template, render_template
from outpace.models.load import LoadedFiles

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_FIRST = """
{%- if tools %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1, calls=0) %}
{% for m in messages %}
    {% if m.role == 'tool' %}
        {% set ns.calls = ns.calls + 1 %}
        {% continue %}
    {% endif %}
    {% if m.role == 'end' %}
        {% break %}
    {% endif %}
    {% set ns.last = loop.index0 %}
{{ m.role | upper }}: {{ m.content | trim }}
    {% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}
    {% if m.thinking %}({{ m.thinking }}){% endif %}
    {% if m.tool_calls is defined %}{{ m.tool_calls | tojson(ensure_ascii=True, sort_keys=True) }}{% endif %}
{% endfor %}
{{ ns.last }}/{{ ns.calls }}{{ mood }}{{ bos_token }}{{ documents }}
"""
FUNCTIONS = (
    "{% macro show(m) %}[{{ m['role'] }}]{{ caller() if caller else '' }}{% endmacro %}"
    "{{ dict(a=1, b=[1, 2]) | tojson(separators=(',', ':')) }}{{ dict.fromkeys(['x'], 3) | tojson }}"
    "{{ '%Y' | length }}{{ strftime_now('%d %b %Y') }}"
    "{% for m in messages %}{{ show(m) }}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    "{{ messages | map(attribute='role') | join(',') }}{{ '<&>' | tojson }}{{ none is none }}{{ true }}{{ 0.1 }}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}="
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "tools first": TOOLS_FIRST, "functions": FUNCTIONS, "parts": PARTS}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "  Hello <b>&amp; é 😀\n"}],
    "reasoned": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a ", "reasoning": "because"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "b", "reasoning_content": "r", "thinking": "t"},
    ],
    "called": [
        {"role": "user", "content": "w"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "é", "arguments": {"b": 1, "a": 2}}}],
        },
        {"role": "tool", "content": "3 °C"},
        {"role": "end", "content": "x"},
        {"role": "user", "content": "never"},
    ],
}
PARTED = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see "}, {"type": "text", "text": "it "}]}
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<d> ü", "parameters": {"z": 1, "a": [True, None]}},
}
VARIABLES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "prompt": {"add_generation_prompt": True},
    "tools": {"tools": [TOOL, TOOL], "add_generation_prompt": True, "mood": "gay", "bos_token": "<s>"},
    "documents": {"documents": [{"title": "t", "text": "x"}], "mood": {"a": (1, 2.5)}, "tools": []},
}


def reference(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    text: str = chat_template_utils.render_jinja_template([messages], chat_template=template, **variables)[0][0]
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", CONVERSATIONS)
def test_text_is_that_of_transformers(name: str, said: str) -> None:
    for variables in VARIABLES.values():
        expected = reference(TEMPLATES[name], CONVERSATIONS[said], **variables)
        assert render_template(TEMPLATES[name], CONVERSATIONS[said], **variables) == expected
        assert expected.strip()


def test_text_of_a_real_model_is_that_of_transformers(smollm2_files: LoadedFiles) -> None:
    (template,) = smollm2_files.tokenizer.chat_templates.values()
    for messages in CONVERSATIONS.values():
        for opens in (False, True):
            expected = reference(template, messages, add_generation_prompt=opens)
            assert render_template(template, messages, add_generation_prompt=opens) == expected


@dataclass
class Note:
    title: str
    pages: tuple[int, ...]


class Word(str):
    """A text with methods of its own."""


class Model:
    """As pydantic's."""

    def model_dump(self) -> dict[str, Any]:
        return {"content": Word("dumped"), "other": Note("t", (1, 2))}


@pytest.mark.parametrize(
    "value",
    [Word("w"), True, np.float32(0.5), np.int64(7), np.bool_(False), Note("n", (3,)), Model(), object(), [Word("x")],
     (1, None), {Word("k"): np.int8(1)}, {1, 2}, len, np.zeros(2)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_templates_see_is_plain(value: Any) -> None:
    template = "{{ x }}|{{ messages[0].content }}|{% if x %}yes{% endif %}|{{ x is string }}{{ x is mapping }}"
    messages = [{"role": "user", "content": value}]
    assert render_template(template, messages, x=value) == reference(template, messages, x=value)


def test_functions_as_tools_become_schemas() -> None:
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: where.
        """
        return city

    said = CONVERSATIONS["short"]
    expected = reference(TOOLS_FIRST, said, tools=[weather])
    assert render_template(TOOLS_FIRST, said, tools=[weather]) == expected
    assert '"name": "weather"' in expected


TRIMMING = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"


GOING_ON = {
    f"{name}, {said}": (template, messages)
    for name, template in {"chatml": CHATML, "trimming": TRIMMING, "parts": PARTS}.items()
    for said, messages in CONVERSATIONS.items()
} | {"several parts": (PARTS, PARTED)}


@pytest.mark.parametrize(("template", "messages"), GOING_ON.values(), ids=GOING_ON)
def test_a_message_that_goes_on(template: str, messages: list[dict[str, Any]]) -> None:
    before = repr(messages)
    expected = reference(template, messages, continue_final_message=True)
    assert render_template(template, messages, continue_final_message=True) == expected
    assert repr(messages) == before, "the caller's messages were changed"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, [{"role": "user", "content": None}]),
        (CHATML, [{"role": "user"}]),
        ("{{ messages[0].role }}", [{"role": "user", "content": "hi"}]),
        (PARTS, [{"role": "user", "content": [{"type": "image"}]}]),
        ("{{ messages[0].content | upper }}", [{"role": "user", "content": "hi"}]),
        ("{{ messages[0].content | length }}", [{"role": "user", "content": "hi"}]),
    ],
)
def test_a_message_that_cannot_go_on(template: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="continue"):
        reference(template, messages, continue_final_message=True)
    with pytest.raises(ValueError, match="continue"):
        render_template(template, messages, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ dict.__class__.__subclasses__() }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__module__.x }}",
        "{{ '{0.__class__.__mro__}'.format(1).x }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ messages[3].content }}",
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_must_not_do_fails_here_as_there(template: str) -> None:
    messages = CONVERSATIONS["short"]
    with pytest.raises(Exception) as theirs:
        reference(template, messages)
    with pytest.raises(type(theirs.value)):
        render_template(template, messages)
    assert messages == [{"role": "user", "content": "  Hello <b>&amp; é 😀\n"}]


def test_a_template_that_is_none_names_its_line() -> None:
    with pytest.raises(TemplateSyntaxError) as caught:
        compile_template("a\n{% if %}")
    assert caught.value.lineno == 2
    assert compile_template(CHATML) is compile_template(CHATML)


def test_rendering_needs_no_transformers() -> None:
    program = (
        "import sys; from outpace.models.chat_template import render_template as r; "
        "print(r('{{ messages[0].content }}', [{'content': 'hi'}])); sys.exit('transformers' in sys.modules)"
    )
    root = Path(__file__).parents[2] / "src"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(root)}
    )
    assert (found.returncode, found.stdout) == (0, "hi\n"), found.stderr

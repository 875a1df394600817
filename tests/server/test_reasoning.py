"""Reasoning is split off the same however the answer comes, and an answer without any is all content."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import InvalidParameter
from outpace.server.reasoning import REASONING_FORMATS, detect_reasoning, make_splitter

OPENED = "<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>assistant\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def split(pieces: list[str], prompt: str = PLAIN, name: str = "qwen3") -> tuple[str, str]:
    splitter = make_splitter(name, prompt)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    (PLAIN, "Just an answer.", "", "Just an answer."),
    (PLAIN, "<think>\nHm.\n\nYes.\n</think>\n\nAn answer.\n", "Hm.\n\nYes.", "An answer.\n"),
    (PLAIN, "\n <think>Hm.</think> answer", "Hm.", " answer"),
    (PLAIN, "<think>\n\n</think>\n\nAn answer.", "", "An answer."),
    (PLAIN, "<think>cut off <th </thin", "cut off <th </thin", ""),
    (PLAIN, "<think>line\n", "line\n", ""),
    (PLAIN, "a <think>b</think> c", "", "a <think>b</think> c"),
    (PLAIN, "a</think>b", "", "a</think>b"),
    (PLAIN, "<thi", "", "<thi"),
    (PLAIN, " \n", "", " \n"),
    (PLAIN, "<thinking> é", "", "<thinking> é"),
    (PLAIN, "<think>a</think>\n\n", "a", ""),
    (PLAIN, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (OPENED, "Hm <é>.\n</think>\n\nAn answer.", "Hm <é>.", "An answer."),
    (OPENED, "<think>\nHm.</think>An answer.", "Hm.", "An answer."),
    (OPENED, "Hm, cut off", "Hm, cut off", ""),
    (OPENED, "<thi", "<thi", ""),
    (CLOSED, "An answer.", "", "An answer."),
]


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), CASES)
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_split_off(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    def marked(part: str) -> str:
        return part.replace("<think>", "◁think▷").replace("</think>", "◁/think▷") if name == "kimi" else part

    expected = (marked(reasoning), marked(content))
    for pieces in ([marked(text)], list(marked(text)), [marked(text)[:5], marked(text)[5:]]):
        assert split(pieces, marked(prompt), name) == expected


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "é😀", "</think"]), max_size=12
    ),
    st.sampled_from([PLAIN, OPENED]),
    st.data(),
)
def test_cuts_change_nothing(fragments: list[str], prompt: str, data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning, content = split([text], prompt)
    assert split(pieces, prompt) == split(list(text), prompt) == (reasoning, content)
    nothing_lost = rf"\s*(<think>)?\n*{re.escape(reasoning)}\n*(</think>)?\n*{re.escape(content)}"
    assert re.fullmatch(nothing_lost, text)


def test_what_is_certain_is_not_held_back() -> None:
    splitter = make_splitter("deepseek_r1", PLAIN)
    pieces = ["<th", "ink>", "\n", "Hm", " </", "b>\n", "\nso </think", ">\n", "\nAn", " answer", "\n"]
    assert [splitter.push(piece) for piece in pieces] == [
        ("", ""),
        ("", ""),
        ("", ""),
        ("Hm", ""),
        (" ", ""),
        ("</b>", ""),
        ("\n\nso ", ""),
        ("", ""),
        ("", "An"),
        ("", " answer"),
        ("", "\n"),
    ]
    assert splitter.finish() == ("", "")


def test_formats_are_recognised_by_the_template() -> None:
    qwen3 = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    assert detect_reasoning(qwen3) == "qwen3"
    assert detect_reasoning("content.split('</think>')[-1] {{'<｜Assistant｜><think>\\n'}}") == "deepseek_r1"
    assert detect_reasoning("{{ content.split('◁/think▷') }}") == "kimi"
    assert detect_reasoning("{{ message.content }}") is None
    with pytest.raises(InvalidParameter, match=r"reasoning_parser='granite' .* deepseek_r1, qwen3, kimi"):
        make_splitter("granite", PLAIN)

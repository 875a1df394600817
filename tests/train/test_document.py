"""Which tokens of a conversation count, with real templates and by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outpace.errors import BadInput
from outpace.models.tokenizer import Tokenizer, TokenizerSettings
from outpace.train.data.document import Document, chat_document
from tests.models.tiny_tokenizers import byte_level
from tests.train.tiny import TEMPLATE

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b?"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.fixture
def make() -> Callable[[str], Tokenizer]:
    return lambda template: Tokenizer(byte_level(), TokenizerSettings({"eos_token": "</s>"}, {"default": template}))


def counted(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    document = chat_document(tokenizer, messages, tokenizer.eos_ids)
    assert len(document.ids) == len(document.labels)
    return tokenizer.decode([i for i, label in zip(document.ids, document.labels, strict=True) if label], False)


def test_the_assistants_words_and_their_end_count(make: Callable[[str], Tokenizer]) -> None:
    """What the template writes behind </s> is not said by the model, what it writes before an answer neither."""
    assert counted(make(TEMPLATE), TALK) == "b?</s>d</s>"
    assert counted(make(TEMPLATE), TALK[:2]) == "b?</s>"
    assert counted(make(TEMPLATE), TALK[:1]) == ""


def test_an_answer_that_begins_the_conversation(make: Callable[[str], Tokenizer]) -> None:
    assert counted(make(TEMPLATE), TALK[1:3]).endswith("b?</s>")


def test_tokens_that_span_the_border_belong_to_neither_side(make: Callable[[str], Tokenizer]) -> None:
    """`he` is one token: where the prompt ends in h and the answer begins with e, the token holds both."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "ah"}, {"role": "assistant", "content": "ello"}]
    document = chat_document(make(template), talk)
    assert make(template).decode(document.ids) == "ahello"
    assert sum(document.labels) == len(document.ids) - 1  # all but "a"


def test_a_template_that_rewrites_the_past_is_refused(make: Callable[[str], Tokenizer]) -> None:
    template = "{{ messages | length }}{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    with pytest.raises(BadInput, match="message 2 differently"):
        chat_document(make(template), TALK)


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"),
    [(3, 5, 3), (8, 4, 8), (9, 4, 8), (100, 4, 8), (100, 10, 3), (2, 30, 2), (100, 12, 3), (100, 30, 3)],
)
def test_a_prompt_too_long_for_a_window_loses_its_beginning(prompt: int, answer: int, kept: int) -> None:
    """Of 12 tokens a quarter is the prompt's, be the answer as long as it may."""
    ids = list(range(prompt))
    document = Document.answer(ids, [99] * answer, 12)
    assert list(document.ids) == [*ids[prompt - kept :], *[99] * answer]
    assert [bool(label) for label in document.labels] == [False] * kept + [True] * answer


def test_no_template() -> None:
    with pytest.raises(BadInput, match="no chat template"):
        chat_document(Tokenizer(byte_level()), TALK)


@pytest.mark.smollm2
def test_smollm2(smollm2_files) -> None:
    document = chat_document(smollm2_files.tokenizer, TALK, smollm2_files.eos_ids)
    words = [i for i, label in zip(document.ids, document.labels, strict=True) if label]
    assert smollm2_files.tokenizer.decode(words, False) == "b?<|im_end|>d<|im_end|>"
